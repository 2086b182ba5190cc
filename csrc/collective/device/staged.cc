#include "collective/device/staged.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/keep_for_good.h"

namespace ringdl {
namespace {

std::vector<int> numbers(int count) {
  std::vector<int> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

Executor::Ticket ask(Executor& copier, const Staged::Copy& copy) {
  return copy.bytes == 0 ? Executor::kDone : copier.copy(copy.into, copy.from, copy.bytes);
}

}  // namespace

Staged::Staged(MayBegin may_begin, Copiers copiers, std::vector<Slab> slabs, size_t places,
               std::shared_ptr<void> stage, Make make, int rank, int size)
    : may_begin_(std::move(may_begin)),
      copiers_(copiers),
      slabs_(std::move(slabs)),
      places_(places),
      stage_(std::move(stage)),
      make_(std::move(make)),
      between_ranks_(numbers(size), rank),
      inner_(make_(0)) {}

Staged::~Staged() {
  for (const Executor::Ticket ticket : in_) await(copiers_.in, ticket);
  for (const Executor::Ticket ticket : out_) await(copiers_.out, ticket);
  // It has failed here, and ranks of this host that do not know yet go on with the stage.
  if (stage_ && current_ < slabs_.size() && inner_->pieces() >= 0)
    keep_for_a_while(std::move(stage_));
}

void Staged::prepare(Channel& channel) {
  between_ranks_.begin(channel);
  inner_->prepare(between_ranks_);
  has_begun_ = true;
}

// A place is free once the slab that was there before has left it.
void Staged::ask_in() {
  while (in_.size() < slabs_.size()) {
    const size_t next = in_.size();
    if (next >= places_) {
      const size_t before = next - places_;
      if (before >= out_.size() || !copiers_.out.is_done(out_[before])) return;
    }
    in_.push_back(ask(copiers_.in, slabs_[next].in));
  }
}

bool Staged::step(Channel& channel) {
  may_copy_ = may_copy_ || may_begin_();
  if (!may_copy_) return false;
  ask_in();
  while (current_ < slabs_.size()) {
    if (!has_begun_) prepare(channel);
    if (in_.size() <= current_ || !copiers_.in.is_done(in_[current_])) return false;
    between_ranks_.use(channel);
    if (!inner_->step(between_ranks_)) return false;
    moved_ += std::max<int64_t>(inner_->pieces(), 0) + 1;
    out_.push_back(ask(copiers_.out, slabs_[current_].out));
    if (current_ + 1 < slabs_.size()) {
      inner_ = make_(current_ + 1);
      has_begun_ = false;
    }
    ++current_;
    ask_in();
  }
  if (!out_.empty() && !copiers_.out.is_done(std::ranges::max(out_))) return false;
  in_.clear();  // what has gathered lives on, after the copiers
  out_.clear();
  stage_.reset();
  return true;
}

// Never -1: copies end without messages.
int64_t Staged::pieces() const {
  const bool counts = current_ < slabs_.size();
  return moved_ + (counts ? std::max<int64_t>(inner_->pieces(), 0) : 0);
}

std::string Staged::describe() const {
  if (current_ == slabs_.size()) return "copy to the device: the last slab is on its way";
  return inner_->describe() + ", slab " + std::to_string(current_ + 1) + " of " +
         std::to_string(slabs_.size()) + " by way of the host's memory";
}

}  // namespace ringdl
