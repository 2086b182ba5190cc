#pragma once

#include <functional>
#include <map>
#include <vector>

#include "collective/channel.h"
#include "engine/control.h"
#include "engine/group.h"
#include "engine/message_sequence.h"
#include "engine/tags.h"

namespace ringdl {

struct EngineCounters {
  int64_t data_messages_sent = 0;
  int64_t data_bytes_sent = 0;
  int64_t grants_sent = 0;
};

/// What all channels of an engine share, and the ranks that this one connects.
struct ChannelContext {
  Transport& transport;
  ControlPlane& control;
  TagPools& tags;  // by sending rank of the transport
  EngineCounters& counters;
  SharedGroup group;

  /// The transport's number of a member.
  int rank_of(int member) const { return group->ranks[static_cast<size_t>(member)]; }
};

/// The channel of a work that is matched by its header.
///
/// The first message to each rank carries the header, and nothing is taken from a rank before its
/// header agrees. Messages of at most `inline_bytes` are sent as control messages, so they need no
/// tag and are accepted even before the receiver has submitted the key. Longer ones wait for the
/// receiver's grant, which names the tag. Ranks are numbered as in the group.
class KeyedChannel final : public Channel, public Completion {
 public:
  /// @param touch  called when something has happened that may let the work go on
  KeyedChannel(ChannelContext context, Key key, const Description& description,
               std::function<void()> touch);

  int rank() const override { return context_.group->rank; }
  int size() const override { return context_.group->size(); }
  void send(int to, const void* data, size_t bytes) override;
  void receive(int from, void* data, size_t bytes) override;
  int64_t sent(int to) const override;
  int64_t received(int from) const override;
  bool agreed() const override { return agreed_; }  // the previous rank

  /// Sends this rank's header to the next rank, with the first message if that is inline.
  /// @param can_wait  whether to wait for that message if there is none yet
  void announce(bool can_wait);

  /// The header of rank `from` has arrived and agrees.
  void agree(int from, const Description& theirs);

  /// A control message for this key.
  void deliver(int from, int64_t sequence, const std::byte* payload, size_t bytes);
  void grant(int from, int tag);
  /// The sender has given up: it has sent so many messages on the tag that it was granted.
  void close(int from, int64_t sent, size_t longest);

  /// Tries again to get tags for receives that found the pool empty.
  void route_waiting();

  /// What is left of a granted tag when a work fails: messages may still arrive on it.
  struct OpenTag {
    int from;  // the transport's number
    int tag;
    int64_t received;
    int64_t sent;          // -1 until the sender has reported it,
    size_t longest_bytes;  // and with it how long the longest is
  };

  /// Gives the tags back; everything has arrived.
  void finish();

  /// Withdraws the receives, reports to the receivers how much was sent, and returns the tags that
  /// stay occupied until their senders have reported the same.
  std::vector<OpenTag> abort();

  /// Whether no send is in flight.
  bool idle() const;

  void ended(Ticket ticket) override;

 private:
  struct Edge {
    MessageSequence messages;
    bool greeted = false;     // the header was sent, or has arrived and agrees
    size_t inline_bytes = 0;  // the sender's
    int tag = -1;
    int64_t tagged = 0;                                // messages sent, or received, on it
    size_t longest_bytes = 0;                          // of them
    int64_t closed = -1;                               // how many the sender sent, if it gave up
    std::map<int64_t, std::vector<std::byte>> parked;  // inline payload that arrived early
  };

  int next() const { return (rank() + 1) % size(); }
  int previous() const { return (rank() + size() - 1) % size(); }
  void greet(int to, Edge& edge);
  void start_send(int to, Edge& edge, int64_t number);
  void route(int from, Edge& edge, int64_t number);
  void route_all(int from, Edge& edge);
  MessageHead head(MessageType type) const;

  ChannelContext context_;
  Key key_;
  Description description_;
  std::function<void()> touch_;
  bool announced_ = false;
  bool agreed_ = false;
  std::map<int, Edge> out_;
  std::map<int, Edge> in_;
};

/// The channel of one instance of a bucket: its meaning was agreed when it was created, so its
/// messages go straight to tags of their own and receives may be posted before it is launched.
class BucketChannel final : public Channel, public Completion {
 public:
  BucketChannel(ChannelContext context, int tag, std::function<void()> touch);

  int rank() const override { return context_.group->rank; }
  int size() const override { return context_.group->size(); }
  void send(int to, const void* data, size_t bytes) override;
  void receive(int from, void* data, size_t bytes) override;
  int64_t sent(int to) const override { return out_.ended(to); }
  int64_t received(int from) const override { return in_.ended(from); }
  bool agreed() const override { return true; }

  /// Withdraws the receives.
  void abort();
  bool idle() const { return out_.all_ended(); }

  void ended(Ticket ticket) override;

 private:
  ChannelContext context_;
  int tag_;
  std::function<void()> touch_;
  MessageSequences out_;
  MessageSequences in_;
};

}  // namespace ringdl
