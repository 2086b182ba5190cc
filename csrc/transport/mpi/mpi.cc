#include "transport/mpi/mpi.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <vector>

#include "base/error.h"
#include "transport/mpi/mpi_abi.h"
#include "transport/slots.h"

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
    check(mpi_.Isend(data, static_cast<int>(bytes), byte_, to, tag, comm_, &request), "MPI_Isend");
    return track(request, owner);
  }

  Ticket receive(int from, int tag, void* data, size_t bytes, Completion& owner) override {
    Handle request;
    check(mpi_.Irecv(data, static_cast<int>(bytes), byte_, from == kAnyRank ? any_source_ : from,
                     tag, comm_, &request),
          "MPI_Irecv");
    return track(request, owner);
  }

  int poll() override {
    if (requests_.empty()) return 0;
    int found = 0;
    const int result = mpi_.Testsome(static_cast<int>(requests_.size()), requests_.data(), &found,
                                     indices_.data(), statuses_.data());
    if (found <= 0) {  // nothing, or MPI_UNDEFINED
      check(result, "MPI_Testsome");
      return 0;
    }
    int failure = result;  // if MPI_ERR_IN_STATUS: what the first failed message met
    for (int i = 0; i < found && result != 0; ++i) {
      if (statuses_[i].error != 0) {
        failure = statuses_[i].error;
        break;
      }
    }
    for (int i = 0; i < found; ++i) ending_.push_back(tickets_[indices_[i]]);
    std::sort(indices_.begin(), indices_.begin() + found, std::greater<>());
    for (int i = 0; i < found; ++i) forget(indices_[i]);
    check(failure, "MPI_Testsome");
    while (!ending_.empty()) {
      const Ticket ticket = ending_.front();
      ending_.pop_front();
      slots_[ticket].owner->ended(ticket);
      slots_.remove(ticket);
    }
    return found;
  }

  bool withdraw(Ticket receive) override {
    if (const auto it = std::find(ending_.begin(), ending_.end(), receive); it != ending_.end()) {
      ending_.erase(it);  // an owner withdraws while poll() tells it of another ending
      slots_.remove(receive);
      return false;
    }
    const int index = slots_[receive].index;
    check(mpi_.Cancel(&requests_[index]), "MPI_Cancel");
    Status status{};
    for (int flag = 0; flag == 0;) check(mpi_.Test(&requests_[index], &flag, &status), "MPI_Test");
    int cancelled = 0;
    check(mpi_.Test_cancelled(&status, &cancelled), "MPI_Test_cancelled");
    forget(index);
    slots_.remove(receive);
    return cancelled != 0;
  }

  void expect_stray_messages() override { frees_communicator_ = false; }

 private:
  struct Slot {
    Completion* owner;
    int index;  // into requests_
  };

  static Handle to_handle(uint64_t value) {
    if constexpr (sizeof(Handle) == sizeof(uint64_t)) {
      return std::bit_cast<Handle>(value);
    } else {
      return static_cast<Handle>(value);
    }
  }

  void check(int result, const char* call) const {
    if (result == 0) return;
    char text[1024] = "";  // MPI_MAX_ERROR_STRING is 256 in Open MPI and 512 in MPICH
    int length = 0;
    mpi_.Error_string(result, text, &length);
    throw Error(std::string(call) + " failed: " + text);
  }

  Ticket track(Handle request, Completion& owner) {
    const Ticket ticket = slots_.add({&owner, static_cast<int>(requests_.size())});
    requests_.push_back(request);
    tickets_.push_back(ticket);
    indices_.resize(requests_.size());
    statuses_.resize(requests_.size());
    return ticket;
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
  SlotTable<Slot> slots_;
  std::vector<Handle> requests_;  // those in flight, without holes
  std::vector<Ticket> tickets_;   // theirs
  std::vector<int> indices_;
  std::vector<Status> statuses_;
  std::deque<Ticket> ending_;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(const MpiLibrary& library) {
  if (library.open_mpi) return std::make_unique<MpiTransport<mpi::OpenMpiAbi>>(library);
  return std::make_unique<MpiTransport<mpi::MpichAbi>>(library);
}

}  // namespace ringdl
