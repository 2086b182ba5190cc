#include "server/shard_service.h"

#include <string>
#include <utility>

#include "server/visit.h"

namespace ringdl {
namespace {

constexpr int kCaller = 0;

// Of one step: other works are not to wait for longer.
constexpr int kBlocksPerStep = 4;

// Locks are asked for at every poll; whether their holder has ended, now and then.
constexpr int kStepsPerLook = 64;

// How many blocks it has done.
// @param steps  of it so far
int step_visit(Visit& visit, int& steps) {
  int blocks = 0;
  while (blocks < kBlocksPerStep && !visit.is_done()) {
    if (!visit.step(++steps % kStepsPerLook == 0)) break;
    ++blocks;
  }
  return blocks;
}

}  // namespace

// One call: the second of a channel's two ranks.
class ShardService::Answer final : public Collective {
 public:
  Answer(ShardService& service, int from) : service_(service), from_(from) {}

  bool step(Channel& channel) override;
  int64_t pieces() const override {
    return state_ == State::kInLine && needs_stage() ? blocks_ : -1;
  }
  void stop() noexcept override;
  std::string describe() const override;

 private:
  enum class State : uint8_t { kBegins, kInLine, kVisited };

  bool needs_stage() const { return request_.brings() || request_.gets(); }
  bool has_turn() const { return service_.line_.front() == this; }
  size_t bytes(bool is_whole) const {
    const auto& shard = service_.place_.shard;
    return is_whole ? shard->shape().count * item_bytes(shard->shape().dtype) : 0;
  }
  void begin();
  bool visit();
  void leave_line() { std::erase(service_.line_, this); }

  ShardService& service_;
  const int from_;
  Request request_;
  bool is_posted_ = false;
  State state_ = State::kBegins;
  std::optional<Passage> there_, back_;
  std::unique_ptr<Visit> visit_;
  int64_t blocks_ = 0;
  int steps_ = 0;
};

bool ShardService::Answer::step(Channel& channel) {
  if (!std::exchange(is_posted_, true)) channel.receive(kCaller, &request_, sizeof(request_));
  const auto received = [&] { return channel.received(kCaller); };
  const auto sent = [&] { return channel.sent(kCaller); };
  std::byte* const stage = service_.stage_.data();
  if (received() == 0) return false;
  if (state_ == State::kBegins) begin();
  if (state_ == State::kInLine) {
    if (needs_stage() && !has_turn()) return false;
    there_->start(received, [&](int64_t number) {
      const Span segment = there_->segment(number);
      channel.receive(kCaller, stage + segment.begin, segment.bytes);
    });
    if (!there_->is_over(received()) || !visit()) return false;
    state_ = State::kVisited;
  }
  back_->start(sent, [&](int64_t number) {
    const Span segment = back_->segment(number);
    channel.send(kCaller, stage + segment.begin, segment.bytes);
  });
  if (!back_->is_over(sent())) return false;
  leave_line();
  return true;
}

void ShardService::Answer::begin() {
  const Place& place = service_.place_;
  there_.emplace(1, bytes(request_.brings()), place.segment_bytes);
  back_.emplace(0, bytes(request_.gets()), place.segment_bytes);
  state_ = State::kInLine;
  if (needs_stage()) service_.line_.push_back(this);
}

bool ShardService::Answer::visit() {
  const Place& place = service_.place_;
  if (!needs_stage()) {
    uint64_t& last = service_.clocks_[static_cast<size_t>(from_)];
    if (request_.what == Request::What::kClock && request_.number > last) {
      last = request_.number;
      place.clocks->set(from_, request_.clock);
    }
    if (request_.what == Request::What::kLeave) {
      service_.have_left_[static_cast<size_t>(from_)] = true;
    }
    return true;
  }
  if (!visit_) {
    const Shard::Shape& shape = place.shard->shape();
    visit_ = std::make_unique<Visit>(
        std::span<const Shard>(&*place.shard, 1),
        std::vector<Piece>{{shape.begin, shape.count, service_.stage_.data()}}, place.rank,
        place.window.get(), action_of(request_));
  }
  blocks_ += step_visit(*visit_, steps_);
  return visit_->is_done();
}

// What has been brought is not lost with its caller: the service goes on with it.
void ShardService::Answer::stop() noexcept {
  if (visit_ && !visit_->is_done()) {
    std::ranges::replace(service_.line_, static_cast<const void*>(this),
                         static_cast<const void*>(visit_.get()));
    service_.orphan_ = std::move(visit_);
  }
  visit_.reset();
  state_ = State::kVisited;
  leave_line();
}

std::string ShardService::Answer::describe() const {
  if (state_ == State::kBegins) return "parameter server: no request received";
  if (state_ == State::kVisited) return "parameter server: answers";
  if (needs_stage() && !has_turn()) return "parameter server: waits for its turn";
  return "parameter server: receives";
}

ShardService::ShardService(Place place, int members, Buffer stage)
    : place_(std::move(place)),
      stage_(std::move(stage)),
      clocks_(static_cast<size_t>(members)),
      have_left_(static_cast<size_t>(members)) {}

int ShardService::step() {
  if (!orphan_) return 0;
  const int blocks = step_visit(*orphan_, steps_);
  if (orphan_->is_done()) {
    std::erase(line_, orphan_.get());
    orphan_.reset();
  }
  return blocks;
}

bool ShardService::is_over(const std::function<bool(int member)>& is_gone) const {
  return has_left_.load() && !orphan_ && std::ranges::all_of(place_.callers, [&](int member) {
           return have_left_[static_cast<size_t>(member)] || is_gone(member);
         });
}

std::unique_ptr<Collective> ShardService::answer(int from) {
  return std::make_unique<Answer>(*this, from);
}

}  // namespace ringdl
