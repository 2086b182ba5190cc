#include "engine/trace.h"

#include <array>
#include <cstdio>
#include <cstdlib>

#include "base/json.h"

namespace ringdl {
namespace {

std::string microseconds(int64_t ns) {
  std::array<char, 32> text{};
  const std::lldiv_t parts = std::lldiv(std::llabs(ns), 1000);
  std::snprintf(text.data(), text.size(), "%s%lld.%03lld", ns < 0 ? "-" : "", parts.quot,
                parts.rem);
  return text.data();
}

}  // namespace

std::string json_of(const std::vector<Trace::Event>& events, int rank, int64_t origin_ns) {
  const std::string process = std::to_string(rank);
  std::string text;
  for (const Trace::Event& event : events) {
    const std::string begin = microseconds(event.begin_ns - origin_ns);
    if (event.algorithm.empty()) {
      text += R"({"ph": "X", "cat": "wait", "name": )" + quoted("wait for " + event.name) +
              R"(, "pid": )" + process + R"(, "tid": )" + std::to_string(event.thread) +
              R"(, "ts": )" + begin + R"(, "dur": )" + microseconds(event.end_ns - event.begin_ns) +
              "},\n";
      continue;
    }
    const std::string common = R"("cat": "work", "name": )" + quoted(event.name) + R"(, "id": ")" +
                               process + '.' + std::to_string(event.work) + R"(", "pid": )" +
                               process + R"(, "tid": )" + process + R"(, "ts": )";
    if (!event.is_listed) {
      text += R"({"ph": "b", )" + common + begin + R"(, "args": {"algorithm": )" +
              quoted(event.algorithm);
      if (event.bytes > 0) text += R"(, "bytes": )" + std::to_string(event.bytes);
      text += "}},\n";
    }
    if (event.end_ns > 0) {
      text += R"({"ph": "e", )" + common + microseconds(event.end_ns - origin_ns) + "},\n";
    }
  }
  if (!text.empty()) text.resize(text.size() - 2);
  return text;
}

}  // namespace ringdl
