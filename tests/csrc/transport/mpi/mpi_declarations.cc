// Compiled, never run, against the mpi.h of each MPI at hand, with RINGDL_ABI naming the ABI that
// it must have: checks our declarations against the real ones.
#include <mpi.h>

#include <cstddef>
#include <type_traits>

#include "transport/mpi/mpi_abi.h"

using Abi = ringdl::mpi::RINGDL_ABI;
using Ours = ringdl::mpi::Functions<Abi>;

// The handle types differ in name only (int, or a pointer to something opaque), so each function is
// compared after replacing them.
template <class T>
struct Plain {
  using type = T;
};
template <class T>
  requires(std::is_same_v<T, MPI_Comm> || std::is_same_v<T, MPI_Datatype> ||
           std::is_same_v<T, MPI_Request> || std::is_same_v<T, MPI_Errhandler>)
struct Plain<T> {
  using type = Abi::Handle;
};
template <>
struct Plain<MPI_Status*> {
  using type = Abi::Status*;
};
template <>
struct Plain<const MPI_Status*> {
  using type = const Abi::Status*;
};
template <class T>
  requires(std::is_same_v<T, MPI_Comm*> || std::is_same_v<T, MPI_Request*>)
struct Plain<T> {
  using type = Abi::Handle*;
};
template <class R, class... Arguments>
struct Plain<R (*)(Arguments...)> {
  using type = R (*)(typename Plain<Arguments>::type...);
};

#define SAME(name) \
  static_assert(std::is_same_v<Plain<decltype(&MPI_##name)>::type, decltype(Ours::name)>)
SAME(Isend);
SAME(Irecv);
SAME(Iprobe);
SAME(Testsome);
SAME(Test);
SAME(Cancel);
SAME(Test_cancelled);
SAME(Comm_dup);
SAME(Comm_free);
SAME(Comm_rank);
SAME(Comm_size);
SAME(Comm_set_errhandler);
SAME(Error_string);
SAME(Finalized);

static_assert(sizeof(MPI_Comm) == sizeof(Abi::Handle));
static_assert(sizeof(MPI_Status) == sizeof(Abi::Status));
static_assert(offsetof(MPI_Status, MPI_SOURCE) == offsetof(Abi::Status, source));
static_assert(offsetof(MPI_Status, MPI_TAG) == offsetof(Abi::Status, tag));
static_assert(offsetof(MPI_Status, MPI_ERROR) == offsetof(Abi::Status, error));
static_assert(MPI_SUCCESS == 0);
static_assert(MPI_MAX_ERROR_STRING <= 1024);
