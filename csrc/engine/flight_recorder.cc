#include "engine/flight_recorder.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"

namespace ringdl {
namespace {

constexpr char kMagic[8] = {'r', 'i', 'n', 'g', 'd', 'l', 'F', '1'};
constexpr std::string_view kStates[] = {"running", "shutting down", "shut down"};
constexpr int kMostRanks = 1 << 24;
constexpr size_t kMostMembers = 512;  // of a group whose members are known to who reads it

template <size_t kBytes>
void write(char (&to)[kBytes], std::string_view text) {
  const std::string_view fitting = cut_to_fit(text, kBytes - 1);
  fitting.copy(to, fitting.size());
  to[fitting.size()] = '\0';
}

// Seconds since 1970, to the microsecond.
std::string seconds(int64_t unix_ns) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%lld.%06lld", static_cast<long long>(unix_ns / kSecond),
                static_cast<long long>(unix_ns % kSecond / kMicrosecond));
  return text.data();
}

}  // namespace

struct FlightRecorder::Header {
  char magic[8];
  uint64_t flight_bytes;
  int32_t rank;
  int32_t size;
  int64_t process;
  int64_t begin_ns;  // of the engine's clock, as all times
  int64_t unix_ns;   // then
  int64_t seen_ns;
  uint64_t begun;
  uint64_t overwritten;  // of those, in flight without a place
  uint8_t state;
  uint8_t has_thread;
  char host[64];
  char version[32];
  char why[1024];
};

struct FlightRecorder::Flight {
  uint64_t number;
  Key key;
  Description description;
  int64_t begin_ns;
  int64_t end_ns;   // 0: in flight
  int64_t wait_ns;  // since when it is waited for; 0: it is not
  int32_t waits;
  enum : uint8_t { kAll, kNamed, kUnknown } members_are;
  uint64_t members[kMostMembers / 64];  // a bit each
  char group[64];
  char why[512];
};

// Whether all that is looked up has a name: a damaged file may hold anything.
bool FlightRecorder::is_whole(const Flight& flight) {
  const Description& description = flight.description;
  return flight.key.space <= KeySpace::kBox && description.kind <= Kind::kMessage &&
         static_cast<int>(description.dtype) < kDTypeCount &&
         static_cast<int>(description.wire) < kDTypeCount &&
         description.reduction <= Reduction::kBitXor && description.algorithm <= Algorithm::kNccl &&
         description.dimensions >= 0;
}

size_t FlightRecorder::bytes() { return sizeof(Header) + kMost * sizeof(Flight); }

void FlightRecorder::start(std::byte* memory, const Owner& owner, int64_t now) {
  static_assert(std::is_trivially_copyable_v<Flight> && sizeof(Header) % alignof(Flight) == 0);
  header_ = reinterpret_cast<Header*>(memory);
  flights_ = reinterpret_cast<Flight*>(memory + sizeof(Header));
  header_->flight_bytes = sizeof(Flight);
  header_->rank = owner.rank;
  header_->size = owner.size;
  header_->process = owner.process;
  header_->begin_ns = header_->seen_ns = now;
  header_->unix_ns = owner.unix_ns;
  write(header_->host, owner.host);
  write(header_->version, owner.version);
  header_->has_thread = owner.has_thread ? 1 : 0;
  std::memcpy(header_->magic, kMagic, sizeof(kMagic));
}

// The next one whose work has ended; if there is none, simply the next.
size_t FlightRecorder::free_place() const {
  const size_t first = (place_ + 1) % kMost;
  for (size_t i = 0; i < kMost; ++i) {
    place_ = (first + i) % kMost;
    if (flights_[place_].number == 0 || flights_[place_].end_ns != 0) return place_;
  }
  return place_ = first;
}

uint64_t FlightRecorder::begin(const Key& key, const Description& description, const Group& group,
                               int64_t now, bool is_alone) {
  if (header_ == nullptr) return 0;
  const size_t place = free_place();
  Flight& flight = flights_[place];
  if (flight.number != 0 && flight.end_ns == 0) header_->overwritten += 1;
  const std::atomic_ref<uint64_t> number(flight.number);
  number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  flight.key = key;
  flight.description = description;
  flight.begin_ns = now;
  flight.end_ns = flight.wait_ns = 0;
  flight.waits = 0;
  flight.members_are = Flight::kAll;
  flight.group[0] = flight.why[0] = '\0';
  if (!group.is_all()) {
    write(flight.group, group.text);
    const std::vector<int> alone{header_->rank};
    const std::vector<int>& ranks = is_alone ? alone : group.ranks;
    std::fill(std::begin(flight.members), std::end(flight.members), 0);
    const bool are_known = std::ranges::all_of(
        ranks, [](int rank) { return static_cast<size_t>(rank) < kMostMembers; });
    flight.members_are = are_known ? Flight::kNamed : Flight::kUnknown;
    for (const int rank : ranks) {
      if (are_known) flight.members[rank / 64] |= uint64_t{1} << rank % 64;
    }
  }
  header_->begun += 1;
  header_->seen_ns = now;
  number.store(header_->begun, std::memory_order_release);
  return header_->begun * kMost + place;
}

// Null if its place has been taken.
FlightRecorder::Flight* FlightRecorder::find(uint64_t flight) const {
  if (header_ == nullptr || flight == 0) return nullptr;
  Flight& its = flights_[flight % kMost];
  return its.number == flight / kMost ? &its : nullptr;
}

void FlightRecorder::end(uint64_t flight, int64_t now, std::string_view why) {
  Flight* const its = find(flight);
  if (its == nullptr) {
    if (header_ != nullptr && header_->overwritten > 0) header_->overwritten -= 1;
    return;
  }
  write(its->why, why);  // a note of a wait that was given up counts no more
  its->end_ns = header_->seen_ns = now;
}

void FlightRecorder::wait_begins(uint64_t flight, int64_t now) {
  Flight* const its = find(flight);
  if (its == nullptr) return;
  if (its->waits++ == 0) its->wait_ns = now;
}

void FlightRecorder::wait_ends(uint64_t flight) {
  Flight* const its = find(flight);
  if (its == nullptr) return;
  if (--its->waits == 0) its->wait_ns = 0;
}

void FlightRecorder::note(uint64_t flight, std::string_view what) {
  if (Flight* const its = find(flight)) write(its->why, what);
}

void FlightRecorder::see(int64_t now) {
  if (header_ != nullptr) header_->seen_ns = now;
}

void FlightRecorder::leave() {
  if (header_ != nullptr) header_->state = kShuttingDown;
}

void FlightRecorder::note_end(std::string_view why) {
  if (header_ != nullptr) write(header_->why, why);
}

void FlightRecorder::stop(bool is_regular) {
  if (header_ != nullptr && is_regular) header_->state = kShutDown;
  header_ = nullptr;
}

std::string FlightRecorder::json_of(std::string_view memory) {
  Header header;
  if (memory.size() < sizeof(header) || memory.substr(0, sizeof(kMagic) - 1) != "ringdlF") {
    throw UsageError("it is no flight record");
  }
  std::memcpy(&header, memory.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 ||
      header.flight_bytes != sizeof(Flight) || memory.size() != bytes()) {
    throw UsageError("another version of ringdl has written it; read it with that one");
  }
  if (header.rank < 0 || header.rank >= header.size || header.size > kMostRanks) {
    throw UsageError("it is damaged");
  }
  const auto text_of = [](const auto& field) {
    return quoted(std::string_view(field, strnlen(field, sizeof(field))));
  };
  const auto time = [&header](int64_t ns) {
    const auto later = static_cast<uint64_t>(ns) - static_cast<uint64_t>(header.begin_ns);
    return ns == 0 ? "null" : seconds(static_cast<int64_t>(header.unix_ns + later));
  };
  const auto reason = [&](const auto& field) { return field[0] == '\0' ? "null" : text_of(field); };
  std::string text =
      R"({"rank": )" + std::to_string(header.rank) + R"(, "size": )" + std::to_string(header.size) +
      R"(, "process": )" + std::to_string(header.process) + R"(, "host": )" + text_of(header.host) +
      R"(, "version": )" + text_of(header.version) + R"(, "begin": )" + time(header.begin_ns) +
      R"(, "seen": )" + time(header.seen_ns) + R"(, "has_thread": )" +
      (header.has_thread != 0 ? "true" : "false") + R"(, "state": )" +
      quoted(kStates[std::min<size_t>(header.state, kShutDown)]) + R"(, "why": )" +
      reason(header.why) + R"(, "begun": )" + std::to_string(header.begun) +
      R"(, "overwritten": )" + std::to_string(header.overwritten) + R"(, "works": [)";
  std::vector<Flight> flights;
  for (size_t i = 0; i < kMost; ++i) {
    Flight flight;
    const char* const at = memory.data() + sizeof(header) + i * sizeof(flight);
    std::memcpy(&flight, at, sizeof(flight));
    if (flight.number != 0 && is_whole(flight)) flights.push_back(flight);
  }
  std::ranges::sort(flights, {}, &Flight::number);
  for (Flight& flight : flights) {
    Description& description = flight.description;
    description.name[kMaxNameBytes - 1] = '\0';
    description.operation_name[kMaxOperationBytes - 1] = '\0';
    flight.group[sizeof(flight.group) - 1] = '\0';
    Group group;
    group.text = flight.group;
    const bool is_flat = description.dimensions == 0 && description.count != 1;  // a bucket
    const std::string shape =
        is_flat ? "(" + std::to_string(description.count) + ",)" : shape_text(description);
    std::string ranks;
    for (size_t rank = 0; rank < kMostMembers && flight.members_are == Flight::kNamed; ++rank) {
      if ((flight.members[rank / 64] >> rank % 64 & 1) == 0) continue;
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    text +=
        R"({"number": )" + std::to_string(flight.number) + R"(, "key": ")" +
        std::to_string(static_cast<int>(flight.key.space)) + "." + std::to_string(flight.key.hash) +
        R"(", "instance": )" + std::to_string(flight.key.instance) + R"(, "label": )" +
        quoted(label_of(flight.key, description, group)) + R"(, "kind": )" +
        quoted(name_of(description.kind)) + R"(, "dtype": )" + quoted(name_of(description.dtype)) +
        R"(, "compression": )" + quoted(name_of(description.wire)) + R"(, "reduction": )" +
        quoted(reduction_text(description)) + R"(, "memory": )" +
        quoted(name_of(description.memory)) + R"(, "shape": )" + quoted(shape) + R"(, "root": )" +
        std::to_string(description.root) + R"(, "ranks": )" +
        (flight.members_are == Flight::kAll ? "null" : "[" + ranks + "]") + R"(, "begin": )" +
        time(flight.begin_ns) + R"(, "end": )" + time(flight.end_ns) + R"(, "waited_since": )" +
        time(flight.wait_ns) + R"(, "why": )" + reason(flight.why) + "},\n";
  }
  if (!flights.empty()) text.resize(text.size() - 2);
  return text + "]}";
}

}  // namespace ringdl
