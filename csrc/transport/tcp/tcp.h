#pragma once

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace ringdl {

/// Messages over stream sockets, for ranks that no MPI connects.
///
/// A message is its tag, its length, and its bytes, written from the caller's buffer and, where
/// its receive was posted before and it is not small, read into the caller's buffer. Whatever
/// arrives is read at once and kept until it is received, so a message that waits for its receive
/// never holds up those behind it.
///
/// A rank whose connection ends is lost(): what it sent before has been delivered by then.
///
/// A forked child closes its copies of the sockets, so that a rank's end is noticed while its
/// children live on. The destructor waits up to a second until the other ends are closed, too:
/// closing a socket with unread bytes may discard what the other end has not read yet.
///
/// @param sockets  to each rank, by rank: connected, and used by nobody else; -1 for this rank.
/// They are taken over.
/// @throws Error  a system call fails
std::unique_ptr<Transport> make_tcp_transport(int rank, std::vector<int> sockets);

}  // namespace ringdl
