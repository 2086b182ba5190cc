#include "transport/tcp/connection.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/clock.h"
#include "base/error.h"

namespace ringdl::tcp {
namespace {

// A message of up to kWholeBytes has to fit. What is staged is copied once more, so it is not much
// larger.
constexpr size_t kStagedBytes = 16 << 10;

// At most this much is read from one connection while others wait.
constexpr size_t kBytesPerLook = 1 << 20;

// Messages that are written by one call.
constexpr size_t kSendsPerCall = 8;

bool is_not_yet(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// The errors of a connection whose other end's host, or the network there, is gone.
bool is_unreachable(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN ||
         error == EHOSTDOWN;
}

// Those, and of one whose other end was closed.
bool is_end(int error) {
  return error == EPIPE || error == ECONNRESET || error == ECONNABORTED || is_unreachable(error);
}

}  // namespace

int check_call(int result, const char* call) {
  if (result == -1) throw Error(std::string(call) + " failed: " + std::strerror(errno));
  return result;
}

Connection::Connection(Receiver& receiver, int peer, int socket)
    : receiver_(receiver), peer_(peer), socket_(socket), staged_(kStagedBytes) {
  const int flags = check_call(fcntl(socket_, F_GETFL), "fcntl");
  check_call(fcntl(socket_, F_SETFL, flags | O_NONBLOCK), "fcntl");
}

Connection::~Connection() { close(socket_); }

void Connection::send(int tag, const std::byte* data, size_t bytes, Ticket ticket) {
  sends_.push_back({{static_cast<uint32_t>(tag), static_cast<uint32_t>(bytes)}, data, ticket});
  if (sends_.size() == 1) write();
}

void Connection::write() {
  while (!sends_.empty()) {
    std::array<iovec, 2 * kSendsPerCall> parts;
    size_t count = 0;
    size_t skipped = written_;
    size_t wanted = 0;
    for (size_t i = 0; i < std::min(sends_.size(), kSendsPerCall); ++i) {
      Outgoing& each = sends_[i];
      const auto add = [&](const void* data, size_t bytes) {
        const size_t skip = std::min(skipped, bytes);
        skipped -= skip;
        if (skip == bytes) return;
        parts[count++] = {static_cast<char*>(const_cast<void*>(data)) + skip, bytes - skip};
        wanted += bytes - skip;
      };
      add(&each.frame, sizeof(Frame));
      add(each.data, each.frame.bytes);
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t result = sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (result < 0) {
      if (is_not_yet(errno)) return;
      if (!is_end(errno)) check_call(-1, "sendmsg");
      note_end(errno);
      return drop_sends();  // what has arrived from there can still be read
    }
    written_ += static_cast<size_t>(result);
    while (!sends_.empty() && written_ >= sizeof(Frame) + sends_.front().frame.bytes) {
      written_ -= sizeof(Frame) + sends_.front().frame.bytes;
      receiver_.sent(sends_.front().ticket);
      sends_.pop_front();
    }
    if (static_cast<size_t>(result) < wanted) return;
  }
}

void Connection::drop_sends() {
  for (const Outgoing& each : sends_) receiver_.sent(each.ticket);
  sends_.clear();
}

void Connection::note_end(int error) {
  if (is_unreachable(error) && why_lost_.empty()) why_lost_ = std::strerror(error);
}

void Connection::give_up(const std::string& why) {
  why_lost_ = why;
  drop_sends();
}

bool Connection::is_unanswered_for(int64_t ns) const {
  tcp_info info{};
  socklen_t bytes = sizeof(info);
  if (getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return false;
  const bool awaits_answer = info.tcpi_unacked > 0 || info.tcpi_probes > 0;
  return awaits_answer && int64_t{info.tcpi_last_ack_recv} * kMillisecond > ns;
}

bool Connection::read() {
  for (size_t sum = 0; sum < kBytesPerLook;) {
    std::array<iovec, 2> parts;
    int count = 0;
    const size_t direct = into_ != nullptr ? left_ : 0;
    if (direct > 0) parts[count++] = {into_, direct};
    parts[count++] = {staged_.data() + end_, staged_.size() - end_};
    const size_t wanted = direct + staged_.size() - end_;
    const ssize_t result = readv(socket_, parts.data(), count);
    if (result < 0 && is_not_yet(errno)) return true;
    if (result < 0 && !is_end(errno)) check_call(-1, "readv");
    if (result < 0) note_end(errno);
    if (result <= 0) {
      drop_sends();
      return false;
    }
    const auto bytes = static_cast<size_t>(result);
    const size_t placed = std::min(bytes, direct);
    if (placed > 0) {
      into_ += placed;
      left_ -= placed;
      if (left_ == 0) receiver_.end_message(peer_);
    }
    end_ += bytes - placed;
    parse();
    if (bytes < wanted) return true;  // there was no more
    sum += bytes;
  }
  return true;
}

// Delivers what is staged, except the beginning of a message that fits and is incomplete.
// While a large message with a target is incomplete, nothing is staged.
void Connection::parse() {
  while (begin_ < end_) {
    const std::byte* const at = staged_.data() + begin_;
    const size_t staged = end_ - begin_;
    if (left_ > 0) {
      const size_t bytes = std::min(staged, left_);
      if (into_ != nullptr) {
        std::memcpy(into_, at, bytes);
        into_ += bytes;
      }
      begin_ += bytes;
      left_ -= bytes;
      if (left_ == 0) receiver_.end_message(peer_);
      continue;
    }
    if (staged < sizeof(Frame)) break;
    Frame frame;
    std::memcpy(&frame, at, sizeof(frame));
    if (frame.bytes > Transport::kMaxMessageBytes) {
      throw Error("rank " + std::to_string(peer_) + " sent what is no message of ringdl");
    }
    if (frame.bytes > kWholeBytes) {
      begin_ += sizeof(frame);
      left_ = frame.bytes;
      into_ = receiver_.begin_message(peer_, static_cast<int>(frame.tag), frame.bytes);
      continue;
    }
    if (staged < sizeof(frame) + frame.bytes) break;
    begin_ += sizeof(frame) + frame.bytes;
    receiver_.deliver(peer_, static_cast<int>(frame.tag), at + sizeof(frame), frame.bytes);
  }
  if (begin_ > 0 && begin_ < end_) {
    std::memmove(staged_.data(), staged_.data() + begin_, end_ - begin_);
  }
  end_ -= begin_;
  begin_ = 0;
}

void Connection::close_for_sending() {
  if (shutdown(socket_, SHUT_WR) == -1 && errno != ENOTCONN) check_call(-1, "shutdown");
}

}  // namespace ringdl::tcp
