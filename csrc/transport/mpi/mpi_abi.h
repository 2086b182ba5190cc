#pragma once

#include <cstddef>

namespace ringdl::mpi {

/// The two binary interfaces that MPI libraries have: what a handle is and how a status is laid
/// out. tests/csrc/transport/mpi/mpi_declarations.cc checks these and the declarations below
/// against a real mpi.h.

/// Open MPI 4 and 5.
struct OpenMpiAbi {
  using Handle = void*;
  struct Status {
    int source, tag, error;
    int cancelled;
    size_t count;
  };
};

/// MPICH since 3.1, and what shares its ABI: Intel MPI, Cray MPICH, MVAPICH.
struct MpichAbi {
  using Handle = int;
  struct Status {
    int count_low, count_high_and_cancelled;
    int source, tag, error;
  };
};

/// The functions that ringdl calls, as types; their names are those of the standard.
template <class Abi>
struct Functions {
  using Handle = typename Abi::Handle;
  using Status = typename Abi::Status;

  int (*Isend)(const void*, int, Handle datatype, int to, int tag, Handle comm, Handle* request);
  int (*Irecv)(void*, int, Handle datatype, int from, int tag, Handle comm, Handle* request);
  int (*Iprobe)(int from, int tag, Handle comm, int* flag, Status*);
  int (*Testsome)(int, Handle* requests, int* count, int* indices, Status*);
  int (*Test)(Handle* request, int* flag, Status*);
  int (*Cancel)(Handle* request);
  int (*Test_cancelled)(const Status*, int* flag);
  int (*Comm_dup)(Handle, Handle*);
  int (*Comm_free)(Handle*);
  int (*Comm_rank)(Handle, int*);
  int (*Comm_size)(Handle, int*);
  int (*Comm_set_errhandler)(Handle comm, Handle errhandler);
  int (*Error_string)(int, char*, int* length);
  int (*Finalized)(int*);
};

}  // namespace ringdl::mpi
