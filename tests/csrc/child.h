#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "check.h"

namespace ringdl::check {

/// Runs `body` in a child process, so that a crash or a hang is a failed check like any other and
/// what follows still runs. Call it while this process has one thread only.
/// @param seconds  the child is killed after that
inline void in_child(const std::string& name, unsigned seconds, const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(seconds);
    checks = failures = 0;
    body();
    std::exit(failures == 0 && checks > 0 ? 0 : 1);
  }
  int status = 0;
  const bool ended = child > 0 && waitpid(child, &status, 0) == child;
  std::string how = " could not be started";
  if (ended && WIFEXITED(status)) how = " exited with " + std::to_string(WEXITSTATUS(status));
  if (ended && WIFSIGNALED(status)) {
    how = WTERMSIG(status) == SIGALRM ? " did not end within " + std::to_string(seconds) + " s"
                                      : " died of signal " + std::to_string(WTERMSIG(status));
  }
  record(ended && WIFEXITED(status) && WEXITSTATUS(status) == 0, __FILE__, __LINE__, name + how);
}

}  // namespace ringdl::check
