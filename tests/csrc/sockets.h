#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "check.h"
#include "transport/tcp/tcp.h"

namespace ringdl::check {

/// Both ends of a TCP connection over 127.0.0.1.
inline std::vector<int> socket_pair() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const where = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof(address);
  CHECK(bind(listener, where, length) == 0 && listen(listener, 1) == 0);
  CHECK(getsockname(listener, where, &length) == 0);
  const int caller = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(connect(caller, where, length) == 0);
  const int called = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  close(listener);
  const int on = 1;
  for (const int each : {caller, called}) {
    CHECK(setsockopt(each, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0);
  }
  return {caller, called};
}

/// For each rank, its sockets to all others, as make_tcp_transport() wants them.
inline std::vector<std::vector<int>> connected_sockets(int size) {
  const auto count = static_cast<size_t>(size);
  std::vector<std::vector<int>> sockets(count, std::vector<int>(count, -1));
  for (size_t a = 0; a < count; ++a) {
    for (size_t b = 0; b < a; ++b) {
      const std::vector<int> pair = socket_pair();
      sockets[a][b] = pair[0];
      sockets[b][a] = pair[1];
    }
  }
  return sockets;
}

/// One transport per rank of this process.
inline std::vector<std::unique_ptr<Transport>> make_tcp(int size) {
  std::vector<std::unique_ptr<Transport>> transports;
  for (auto& sockets : connected_sockets(size)) {
    const int rank = static_cast<int>(transports.size());
    transports.push_back(make_tcp_transport(rank, std::move(sockets)));
  }
  return transports;
}

}  // namespace ringdl::check
