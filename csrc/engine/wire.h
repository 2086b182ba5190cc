#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "base/memory.h"
#include "collective/algorithm.h"
#include "engine/group.h"
#include "reduce/reduce.h"

/// What control messages look like: fixed-size structures in the byte order of the machine (ranks
/// of one job share it), all on one tag.
namespace ringdl {

enum class Kind : uint8_t {
  kAllreduce = 0,
  kBroadcast = 1,
  kAllgather = 2,
  kBarrier = 3,
  kReduceScatter = 4,
  kAlltoall = 5,
  kGather = 6,
  kScatter = 7,
  kMessage = 8,  // from the first to the second of a pair of ranks
};

constexpr std::string_view name_of(Kind kind) {
  constexpr std::string_view names[] = {"allreduce", "broadcast",     "allgather",
                                        "barrier",   "reducescatter", "alltoall",
                                        "gather",    "scatter",       "message"};
  return names[static_cast<int>(kind)];
}

/// Whether ranks may differ in the length of the first dimension, which then is no part of what
/// they agree on.
constexpr bool has_uneven_rows(Kind kind) {
  return kind == Kind::kAllgather || kind == Kind::kAlltoall || kind == Kind::kGather ||
         kind == Kind::kScatter;
}

/// Where a key's hash comes from: a name, the kind of an unnamed call, the number of a bucket, or a
/// box of the mailbox.
enum class KeySpace : uint8_t { kName = 0, kUnnamed = 1, kBucket = 2, kBox = 3 };
inline constexpr size_t kKeySpaces = 4;

/// What works are matched by. The hash also holds the group; the instance counts the uses of one
/// key.
struct Key {
  KeySpace space = KeySpace::kName;
  uint64_t hash = 0;
  uint64_t instance = 0;

  bool operator==(const Key&) const = default;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<uint64_t>()(key.hash * 0x9e3779b97f4a7c15u + key.instance * 4 +
                                 static_cast<uint64_t>(key.space));
  }
};

/// FNV-1a, 64 bits.
constexpr uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

inline constexpr int kMaxDimensions = 8;
inline constexpr size_t kMaxNameBytes = 96;
inline constexpr size_t kMaxOperationBytes = 32;

/// All that another rank needs in order to take part in a work.
struct Description {
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kUInt8;
  Reduction reduction = Reduction::kSum;
  Algorithm algorithm = Algorithm::kRing;
  DType wire = DType::kUInt8;  // what an allreduce's elements are sent as between hosts
  MemoryKind memory = MemoryKind::kCpu;
  int32_t root = -1;  // its number in the group; of an allreduce a digest of what is fused in it
  int32_t dimensions = 0;
  uint32_t inline_bytes = 0;  // messages of at most this size are control messages
  uint64_t group = 0;         // its id
  uint64_t joins = 0;         // how often all ranks had joined before it was submitted
  int64_t count = 0;
  uint64_t shape_hash = 0;          // of all dimensions; the first eight follow
  int64_t shape[kMaxDimensions]{};  // without the first dimension where rows may be uneven
  uint64_t operation = 0;           // digest of a user-defined reduction, or 0
  char operation_name[kMaxOperationBytes]{};
  char name[kMaxNameBytes]{};  // cut to fit, for people; the key holds the hash of all of it
};

enum class MessageType : uint8_t {
  kSubmit = 1,  // description, perhaps with the first message's payload: a rank submitted a key
  kData,        // payload of message `sequence`
  kGrant,       // `tag`: the receiver is ready for the large messages of a key, on this tag
  kClose,       // `sequence` large messages were sent on a granted tag and no more will be; none
                // has more than `value` bytes
  kMismatch,    // text: the key fails on every rank; `flag`: the FailureKind
  kVerdict,     // text: the same, and ranks that never submitted the key skip it
  kQuery,       // has the receiver submitted the key? `sequence` numbers the question
  kAnswer,      // `flag`: submitted; `value`: the serial number of the answering rank's wait
  kCount,     // the same of a census: who has, as far as the receiver knows? `tag`: how far it must
              // know, see Census; `value`: how long to wait for a silent rank
  kCounted,   // its answer, with the same `sequence` and `tag`; `flag`: submitted, and takes part;
              // `value`: how many members are accounted for; the payload: all, two bits each
  kBlocked,   // to rank 0: waiting for the key for a while, `value` is the wait's serial number;
              // the payload holds the members of the key's group, a bit each, unless it is all
  kLeaving,   // the sender shuts down and will submit nothing more; or, along a tree, the ranks
              // in the payload do, a bit each from rank `value` on
  kJoined,    // the sender submits nothing of its own until the meeting number `value`
  kLaunched,  // to a rank that has joined: this bucket was launched
  kQuiet,     // all have left, and what the sender and those below it in the tree have sent has
              // left, too; from above: of all ranks
  kFailed,    // rank `value` has ended without shutdown(), or text: why it cannot be reached
};

struct MessageHead {
  MessageType type = MessageType::kSubmit;
  uint8_t flag = 0;
  uint16_t age_ms = 0;  // of a census, since it was begun somewhere
  int32_t tag = 0;
  uint32_t sequence = 0;
  uint32_t payload_bytes = 0;
  uint64_t value = 0;
  Key key;
};

/// The largest payload of one control message. With the head and the description it stays under
/// 4096 bytes, up to which MPI libraries send shared-memory messages without a handshake.
inline constexpr size_t kMaxPayloadBytes = 2048;
inline constexpr size_t kMaxControlBytes =
    sizeof(MessageHead) + sizeof(Description) + kMaxPayloadBytes;

/// As much of a UTF-8 text as fits, never a part of a character.
std::string_view cut_to_fit(std::string_view text, size_t bytes);

/// Sets the name that people read, cut to fit.
void set_name(Description& description, std::string_view name);
void set_operation_name(Description& description, std::string_view name);

/// "allreduce 'layer1.weight'", "the 3rd unnamed barrier": how errors name a work.
std::string label_of(const Key& key, const Description& description, const Group& group);

/// "(2, 3)"; "(*, 3)" where rows may be uneven.
std::string shape_text(const Description& description);
/// "sum", or the name and the digest of a user's own.
std::string reduction_text(const Description& description);

/// Empty if another rank and this rank mean the same, else what differs: "shape (2, 3) on rank 0
/// and (2, 4) on rank 1".
std::string difference(const Description& theirs, int their_rank, const Description& ours,
                       int our_rank);

}  // namespace ringdl
