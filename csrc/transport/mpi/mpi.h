#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace ringdl {

/// What the transport needs to know of the MPI that mpi4py has loaded. Handles are given as
/// mpi4py.MPI._handleof gives them.
struct MpiLibrary {
  /// Path of mpi4py's extension module: it is loaded, and so is the library it depends on.
  std::string module_path;
  /// True for Open MPI's binary interface, false for MPICH's.
  bool open_mpi = false;
  uint64_t comm = 0;
  uint64_t byte = 0;
  uint64_t errors_return = 0;
  int any_source = 0;
  int max_tag = 0;
};

/// Messages over MPI, on a duplicate of `library.comm`.
///
/// Collective over the communicator. The functions are looked up in the very library that mpi4py
/// uses, so nothing of MPI is needed to build. The destructor withdraws nothing: all operations
/// must have ended before; it frees the duplicate unless MPI has been finalized or stray messages
/// may lie in it: a later communicator could be given the same context, and receive them.
/// @throws Error  if the library lacks a function or a call fails
std::unique_ptr<Transport> make_mpi_transport(const MpiLibrary& library);

}  // namespace ringdl
