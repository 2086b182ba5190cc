#include "transport/mpi/mpi.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <vector>

#include "base/error.h"
#include "transport/mpi/mpi_abi.h"
#include "transport/ticket_table.h"

namespace ringdl {
namespace {

template <class Function>
void look_up(void* module, const char* name, Function& function) {
  function = std::bit_cast<Function>(dlsym(module, name));
  if (function == nullptr) {
    throw Error(std::string("the MPI library has no function ") + name +
                "; ringdl needs an MPI of version 3 or later");
  }
}

template <class Abi>
mpi::Functions<Abi> load_functions(const std::string& module_path) {
  void* module = dlopen(module_path.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (module == nullptr) throw Error("mpi4py's module is not loaded: " + module_path);
  mpi::Functions<Abi> mpi;
  look_up(module, "MPI_Isend", mpi.Isend);
  look_up(module, "MPI_Irecv", mpi.Irecv);
  look_up(module, "MPI_Iprobe", mpi.Iprobe);
  look_up(module, "MPI_Testsome", mpi.Testsome);
  look_up(module, "MPI_Test", mpi.Test);
  look_up(module, "MPI_Cancel", mpi.Cancel);
  look_up(module, "MPI_Test_cancelled", mpi.Test_cancelled);
  look_up(module, "MPI_Comm_dup", mpi.Comm_dup);
  look_up(module, "MPI_Comm_free", mpi.Comm_free);
  look_up(module, "MPI_Comm_rank", mpi.Comm_rank);
  look_up(module, "MPI_Comm_size", mpi.Comm_size);
  look_up(module, "MPI_Comm_set_errhandler", mpi.Comm_set_errhandler);
  look_up(module, "MPI_Error_string", mpi.Error_string);
  look_up(module, "MPI_Finalized", mpi.Finalized);
  return mpi;
}

template <class Abi>
class MpiTransport final : public Transport {
  using Handle = typename Abi::Handle;
  using Status = typename Abi::Status;

 public:
  explicit MpiTransport(const MpiLibrary& library)
      : mpi_(load_functions<Abi>(library.module_path)),
        byte_(to_handle(library.byte)),
        any_source_(library.any_source),
        max_tag_(library.max_tag) {
    check(mpi_.Comm_dup(to_handle(library.comm), &comm_), "MPI_Comm_dup");
    check(mpi_.Comm_set_errhandler(comm_, to_handle(library.errors_return)),
          "MPI_Comm_set_errhandler");
    check(mpi_.Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check(mpi_.Comm_size(comm_, &size_), "MPI_Comm_size");
  }

  ~MpiTransport() override {
    int finalized = 1;
    if (!frees_communicator_) return;
    if (mpi_.Finalized(&finalized) == 0 && finalized == 0) mpi_.Comm_free(&comm_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int max_tag() const override { return max_tag_; }

  Ticket send(int to, int tag, const void* data, size_t bytes, Completion& owner) override {
    Handle request;
    const Ticket ticket = slots_.add({&owner, kUnmatched, to, true});
    const int result = mpi_.Isend(data, static_cast<int>(bytes), byte_, to, tag, comm_, &request);
    if (result == 0) {
      track(ticket, request);
    } else {
      lose(to, result, "MPI_Isend");
      ending_.push_back(ticket);
    }
    return ticket;
  }

  Ticket receive(int from, int tag, void* data, size_t bytes, Completion& owner) override {
    const Ticket ticket = slots_.add({&owner, kUnmatched, from});
    if (from == kAnyRank) {
      unmatched_.push_back({ticket, tag, data, bytes});
    } else {
      start_receive(ticket, from, tag, data, bytes);
    }
    return ticket;
  }

  // A probe makes the library look for messages, as testing does: with both a poll takes twice as
  // long. While messages arrive in receives that name their senders, the first polls after one, in
  // which the next one mostly arrives, do without.
  int poll() override {
    const bool may_skip =
        names_senders_ && fruitless_ < kMostFruitless && unprobed_ < kMostUnprobed;
    unprobed_ = may_skip ? unprobed_ + 1 : 0;
    if (!may_skip) match_receives();
    const int ended = test_requests();
    fruitless_ = ended > 0 ? 0 : fruitless_ + 1;
    return ended;
  }

  const std::vector<Lost>& lost() const override { return lost_; }

  bool withdraw(Ticket receive) override {
    if (const auto it = std::find(ending_.begin(), ending_.end(), receive); it != ending_.end()) {
      ending_.erase(it);  // an owner withdraws while poll() notifies it of another end
      slots_.remove(receive);
      return false;
    }
    const int index = slots_[receive].index;
    if (index == kUnmatched) {
      std::erase_if(unmatched_, [=](const auto& waiting) { return waiting.ticket == receive; });
      slots_.remove(receive);
      return true;
    }
    check(mpi_.Cancel(&requests_[index]), "MPI_Cancel");
    Status status{};
    for (int flag = 0; flag == 0;) check(mpi_.Test(&requests_[index], &flag, &status), "MPI_Test");
    int cancelled = 0;
    check(mpi_.Test_cancelled(&status, &cancelled), "MPI_Test_cancelled");
    forget(index);
    slots_.remove(receive);
    return cancelled != 0;
  }

  bool reads_on() const override { return true; }
  void expect_stray_messages() override { frees_communicator_ = false; }

 private:
  static constexpr int kUnmatched = -1;
  static constexpr int kMostFruitless = 3;
  static constexpr int kMostUnprobed = 16;

  struct Slot {
    Completion* owner;
    int index;  // into requests_, or kUnmatched: it has no request
    int peer;
    bool is_send = false;
    bool was_probed = false;
  };

  // A receive from any rank for which no message has arrived.
  struct Unmatched {
    Ticket ticket;
    int tag;
    void* data;
    size_t bytes;
  };

  static Handle to_handle(uint64_t value) {
    if constexpr (sizeof(Handle) == sizeof(uint64_t)) {
      return std::bit_cast<Handle>(value);
    } else {
      return static_cast<Handle>(value);
    }
  }

  std::string text_of(int result, const char* call) const {
    char text[1024] = "";  // MPI_MAX_ERROR_STRING is 256 in Open MPI and 512 in MPICH
    int length = 0;
    mpi_.Error_string(result, text, &length);
    return std::string(call) + " failed: " + text;
  }

  void check(int result, const char* call) const {
    if (result != 0) throw Error(text_of(result, call));
  }

  // A message to or from a rank has failed.
  void lose(int rank, int result, const char* call) {
    const bool is_known =
        std::ranges::any_of(lost_, [rank](const Lost& one) { return one.rank == rank; });
    if (!is_known) lost_.push_back({rank, text_of(result, call)});
  }

  int test_requests() {
    int found = 0;
    if (requests_.empty()) return report_endings();
    const int result = mpi_.Testsome(static_cast<int>(requests_.size()), requests_.data(), &found,
                                     indices_.data(), statuses_.data());
    if (found <= 0) {  // nothing, or MPI_UNDEFINED
      check(result, "MPI_Testsome");
      return report_endings();
    }
    std::vector<Ticket> failed;
    for (int i = 0; i < found; ++i) {
      const Ticket ticket = tickets_[indices_[i]];
      const int error = result == 0 ? 0 : statuses_[i].error;  // set if MPI_ERR_IN_STATUS
      if (error != 0) {
        lose(slots_[ticket].peer, error, "MPI_Testsome");
        failed.push_back(ticket);
      }
      if (error == 0 || slots_[ticket].is_send) ending_.push_back(ticket);
      if (!slots_[ticket].is_send) names_senders_ = !slots_[ticket].was_probed;
    }
    if (failed.empty()) check(result, "MPI_Testsome");
    std::sort(indices_.begin(), indices_.begin() + found, std::greater<>());
    for (int i = 0; i < found; ++i) forget(indices_[i]);
    for (const Ticket ticket : failed) slots_[ticket].index = kUnmatched;
    return report_endings();
  }

  int report_endings() {
    int told = 0;
    for (; !ending_.empty(); ++told) {
      const Ticket ticket = ending_.front();
      ending_.pop_front();
      slots_[ticket].owner->ended(ticket);
      slots_.remove(ticket);
    }
    return told;
  }

  void start_receive(Ticket ticket, int from, int tag, void* data, size_t bytes) {
    Handle request;
    slots_[ticket].peer = from;
    const int result = mpi_.Irecv(data, static_cast<int>(bytes), byte_, from, tag, comm_, &request);
    if (result == 0) {
      track(ticket, request);
    } else {
      lose(from, result, "MPI_Irecv");  // the receive never ends
    }
  }

  // Receives from any rank are posted once a message has arrived, for its sender. MPICH 5.0.2 over
  // UCX never completes a receive from MPI_ANY_SOURCE that is posted after its message has arrived.
  void match_receives() {
    int fruitless_tag = -1;
    for (size_t i = 0; i < unmatched_.size();) {
      const Unmatched first = unmatched_[i];
      int found = 0;
      Status status{};
      if (first.tag != fruitless_tag) {
        check(mpi_.Iprobe(any_source_, first.tag, comm_, &found, &status), "MPI_Iprobe");
      }
      if (found == 0) {
        fruitless_tag = first.tag;
        ++i;
        continue;
      }
      unmatched_.erase(unmatched_.begin() + static_cast<std::ptrdiff_t>(i));
      slots_[first.ticket].was_probed = true;
      start_receive(first.ticket, status.source, first.tag, first.data, first.bytes);
    }
  }

  void track(Ticket ticket, Handle request) {
    slots_[ticket].index = static_cast<int>(requests_.size());
    requests_.push_back(request);
    tickets_.push_back(ticket);
    indices_.resize(requests_.size());
    statuses_.resize(requests_.size());
  }

  // Fills the hole with the last request: testing walks the whole array each time.
  void forget(int index) {
    requests_[index] = requests_.back();
    tickets_[index] = tickets_.back();
    slots_[tickets_[index]].index = index;
    requests_.pop_back();
    tickets_.pop_back();
  }

  mpi::Functions<Abi> mpi_;
  Handle byte_;
  int any_source_;
  int max_tag_;
  Handle comm_{};
  bool frees_communicator_ = true;
  int rank_ = 0;
  int size_ = 0;
  TicketTable<Slot> slots_;
  std::deque<Unmatched> unmatched_;  // in the order in which they were posted
  std::vector<Handle> requests_;     // those in flight, without holes
  std::vector<Ticket> tickets_;      // theirs
  std::vector<int> indices_;
  std::vector<Status> statuses_;
  std::deque<Ticket> ending_;
  std::vector<Lost> lost_;
  bool names_senders_ = false;  // the receive that ended last
  int unprobed_ = 0;            // polls since the last that probed
  int64_t fruitless_ = 0;       // polls since the last operation has ended
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(const MpiLibrary& library) {
  if (library.open_mpi) return std::make_unique<MpiTransport<mpi::OpenMpiAbi>>(library);
  return std::make_unique<MpiTransport<mpi::MpichAbi>>(library);
}

}  // namespace ringdl
