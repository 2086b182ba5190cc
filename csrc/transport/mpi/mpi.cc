#include "transport/mpi/mpi.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <numeric>
#include <optional>
#include <vector>

#include "base/error.h"
#include "transport/mpi/mpi_abi.h"
#include "transport/ticket_table.h"

namespace ringdl {
namespace {

template <class Function>
bool finds(void* module, const char* name, Function& function) {
  function = std::bit_cast<Function>(dlsym(module, name));
  return function != nullptr;
}

template <class Function>
void look_up(void* module, const char* name, Function& function) {
  if (!finds(module, name, function)) {
    throw Error(std::string("the MPI library has no function ") + name +
                "; ringdl needs an MPI of version 3 or later");
  }
}

void* open_module(const std::string& path) {
  void* module = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (module == nullptr) throw Error("mpi4py's module is not loaded: " + path);
  return module;
}

template <class Abi>
mpi::Functions<Abi> load_functions(void* module) {
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
  look_up(module, "MPI_Error_class", mpi.Error_class);
  look_up(module, "MPI_Error_string", mpi.Error_string);
  look_up(module, "MPI_Finalized", mpi.Finalized);
  look_up(module, "MPI_Comm_group", mpi.Comm_group);
  look_up(module, "MPI_Group_size", mpi.Group_size);
  look_up(module, "MPI_Group_translate_ranks", mpi.Group_translate_ranks);
  look_up(module, "MPI_Group_free", mpi.Group_free);
  return mpi;
}

template <class Abi>
std::optional<mpi::FaultTolerance<Abi>> load_fault_tolerance(void* module) {
  mpi::FaultTolerance<Abi> mpi;
  const bool has_all = finds(module, "MPIX_Comm_revoke", mpi.Comm_revoke) &&
                       finds(module, "MPIX_Comm_failure_ack", mpi.Comm_failure_ack) &&
                       finds(module, "MPIX_Comm_failure_get_acked", mpi.Comm_failure_get_acked);
  if (!has_all) return {};
  return mpi;
}

template <class Abi>
class MpiTransport final : public Transport {
  using Handle = typename Abi::Handle;
  using Status = typename Abi::Status;

 public:
  explicit MpiTransport(const MpiLibrary& library)
      : mpi_(load_functions<Abi>(open_module(library.module_path))),
        fault_tolerance_(load_fault_tolerance<Abi>(open_module(library.module_path))),
        library_(library),
        byte_(to_handle(library.byte)) {
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
  int max_tag() const override { return library_.max_tag; }

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
    int result = 0;
    for (int flag = 0; flag == 0 && result == 0;) {
      result = mpi_.Test(&requests_[index], &flag, &status);
    }
    int cancelled = 1;  // as one that has failed is, in effect
    if (result == 0) {
      check(mpi_.Test_cancelled(&status, &cancelled), "MPI_Test_cancelled");
    } else {
      lose(slots_[receive].peer, result, "MPI_Test");
    }
    forget(index);
    slots_.remove(receive);
    return cancelled != 0;
  }

  void expect_stray_messages() override { frees_communicator_ = false; }

  void revoke() override {
    if (!fault_tolerance_) return;
    frees_communicator_ = false;
    check(fault_tolerance_->Comm_revoke(comm_), "MPIX_Comm_revoke");
  }

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

  int class_of(int result) const {
    int error_class = 0;
    return mpi_.Error_class(result, &error_class) == 0 ? error_class : result;
  }

  // A message to or from a rank has failed.
  void lose(int rank, int result, const char* call) {
    const int error_class = class_of(result);
    if (error_class == library_.revoked_error) {
      lose_all();
    } else {
      add_lost(rank, error_class == library_.failed_error ? "" : text_of(result, call));
    }
  }

  void add_lost(int rank, std::string why) {
    const bool is_known =
        std::ranges::any_of(lost_, [rank](const Lost& one) { return one.rank == rank; });
    if (!is_known && rank != rank_) lost_.push_back({rank, std::move(why)});
  }

  void lose_all() {
    for (int rank = 0; rank < size_; ++rank) {
      add_lost(rank, "it goes on without a rank that has failed");
    }
  }

  // A call that names no rank has failed, as it does until the failures have been acknowledged.
  void note_failed(int result, const char* call) {
    const int error_class = class_of(result);
    if (error_class == library_.revoked_error) return lose_all();
    const bool is_pending =
        error_class == library_.pending_error || error_class == library_.failed_error;
    if (!fault_tolerance_ || !is_pending) return check(result, call);
    Handle failed, all;
    int count = 0;
    check(fault_tolerance_->Comm_failure_ack(comm_), "MPIX_Comm_failure_ack");
    check(fault_tolerance_->Comm_failure_get_acked(comm_, &failed), "MPIX_Comm_failure_get_acked");
    check(mpi_.Group_size(failed, &count), "MPI_Group_size");
    std::vector<int> numbers(static_cast<size_t>(count));
    std::iota(numbers.begin(), numbers.end(), 0);
    std::vector<int> ranks(numbers.size());
    check(mpi_.Comm_group(comm_, &all), "MPI_Comm_group");
    check(mpi_.Group_translate_ranks(failed, count, numbers.data(), all, ranks.data()),
          "MPI_Group_translate_ranks");
    for (const int rank : ranks) add_lost(rank, "");
    check(mpi_.Group_free(&failed), "MPI_Group_free");
    check(mpi_.Group_free(&all), "MPI_Group_free");
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
        const int result = mpi_.Iprobe(library_.any_source, first.tag, comm_, &found, &status);
        if (result != 0) return note_failed(result, "MPI_Iprobe");
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

  const mpi::Functions<Abi> mpi_;
  const std::optional<mpi::FaultTolerance<Abi>> fault_tolerance_;
  const MpiLibrary library_;
  const Handle byte_;
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
