#include "engine/mailbox.h"

#include <utility>

namespace ringdl {

void Mailbox::open(const BoxName& name, std::shared_ptr<Box> box) {
  Opened opened{name, std::move(box), {}};
  const Group& group = *name.group;
  for (int member = 0; member < group.size(); ++member) {
    opened.pairs.push_back(member == group.rank ? nullptr
                                                : group_of_pair(member, group.rank, group));
  }
  boxes_.push_back(std::move(opened));
  are_headers_new_ = true;
}

Key Mailbox::next_key(const BoxName& name, const Group& pair) const {
  return matching_.next(KeySpace::kBox, hash_of(name.text) ^ pair.id);
}

std::shared_ptr<Work> Mailbox::submit(const BoxName& name, const SharedGroup& pair,
                                      std::unique_ptr<Collective> side,
                                      std::shared_ptr<const void> memory) {
  Call call;
  call.kind = Kind::kMessage;
  call.name = name.text;
  call.shape = {0};
  call.group = pair;
  return submitter_.submit_begun(next_key(name, *pair), submitter_.header_of(call), pair,
                                 std::move(side), std::move(memory));
}

std::shared_ptr<Work> Mailbox::call(const BoxName& name, int to,
                                    std::unique_ptr<Collective> caller) {
  return submit(name, group_of_pair(name.group->rank, to, *name.group), std::move(caller), nullptr);
}

int Mailbox::step() {
  int moved = 0;
  for (const Opened& opened : boxes_) moved += opened.box->step();
  std::erase_if(boxes_, [this](const Opened& opened) {
    return opened.box->is_over([&](int member) {
      return membership_.is_gone(opened.name.group->ranks[static_cast<size_t>(member)]);
    });
  });
  if (!std::exchange(are_headers_new_, false)) return moved;
  for (const auto& [name, box, pairs] : boxes_) {
    for (size_t member = 0; member < pairs.size(); ++member) {
      while (pairs[member] && matching_.has_header(next_key(name, *pairs[member]))) {
        submit(name, pairs[member], box->answer(static_cast<int>(member)), box);
        ++moved;
      }
    }
  }
  return moved;
}

}  // namespace ringdl
