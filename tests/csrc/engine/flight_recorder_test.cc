// What a rank has begun can be read from its memory, at any time.

#include "engine/flight_recorder.h"

#include <array>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cluster.h"

using namespace ringdl;
using ringdl::check::Cluster;

namespace {

class Memory {
 public:
  std::byte* data() { return reinterpret_cast<std::byte*>(words_.data()); }
  std::string_view content() {
    return {reinterpret_cast<const char*>(words_.data()), FlightRecorder::bytes()};
  }
  std::string json() { return FlightRecorder::json_of(content()); }

 private:
  std::vector<uint64_t> words_ = std::vector<uint64_t>(FlightRecorder::bytes() / 8 + 1);
};

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

bool has(const std::string& text, const std::string& part) { return count(text, part) > 0; }

constexpr FlightRecorder::Owner kOwner{1, 3, 77, 1000 * kSecond, "north", "9.9", true};

Key key_of(uint64_t instance) { return {KeySpace::kUnnamed, 5, instance}; }

void test_the_last_thousand_are_kept() {
  Memory memory;
  FlightRecorder recorder;
  const SharedGroup all = group_of_all(1, 3);
  CHECK_EQ(recorder.begin(key_of(0), {}, *all, 1), 0u);  // it is not on
  recorder.start(memory.data(), kOwner, 10 * kSecond);
  std::vector<uint64_t> flights;
  const uint64_t old = recorder.begin(key_of(0), {}, *all, 10 * kSecond);
  for (uint64_t i = 1; i < 1500; ++i) {
    flights.push_back(recorder.begin(key_of(i), {}, *all, 11 * kSecond));
    if (i < 1499) recorder.end(flights.back(), 11 * kSecond);
  }
  recorder.end(flights.front(), 12 * kSecond, "its place is taken");
  recorder.end(flights.back(), 12 * kSecond, "it is \"last\"");
  recorder.wait_begins(old, 12 * kSecond);
  const std::string json = memory.json();
  CHECK(has(json, R"("rank": 1, "size": 3, "process": 77, "host": "north", "version": "9.9")"));
  CHECK(has(json, R"("has_thread": true, "state": "running")"));
  CHECK(has(json, R"("begun": 1500)"));
  CHECK_EQ(count(json, R"("number": )"), FlightRecorder::kMost);
  CHECK(has(json, R"("works": [{"number": 1,)"));  // it is in flight
  CHECK(has(json, R"("end": null, "waited_since": 1002.000000)"));
  CHECK(!has(json, R"("number": 2,)"));
  CHECK(!has(json, R"("number": 501,)"));
  CHECK(has(json, R"("number": 502,)"));
  CHECK(!has(json, "its place is taken"));
  CHECK_EQ(count(json, R"("begin": 1001.000000, "end": 1001.000000)"), FlightRecorder::kMost - 2);
  CHECK(has(json, R"("end": 1002.000000, "waited_since": null, "why": "it is \"last\"")"));

  flights.assign(1, old);
  for (uint64_t i = 0; i < 1100; ++i) {
    flights.push_back(recorder.begin(key_of(i), {}, *all, 13 * kSecond));
  }
  CHECK_EQ(count(memory.json(), R"("end": null)"), FlightRecorder::kMost);  // all are in flight
  CHECK(has(memory.json(), R"("overwritten": 101)"));
  for (const uint64_t flight : flights) recorder.end(flight, 14 * kSecond);
  CHECK(has(memory.json(), R"("overwritten": 0)"));
}

// Who did not wait any longer for a work that ends well after all.
void test_a_wait_that_is_given_up() {
  Memory memory;
  FlightRecorder recorder;
  recorder.start(memory.data(), kOwner, 10 * kSecond);
  const uint64_t flight = recorder.begin(key_of(0), {}, *group_of_all(1, 3), 11 * kSecond);
  recorder.note(flight, "it did not end");
  CHECK(has(memory.json(), R"("why": "it did not end")"));
  recorder.end(flight, 12 * kSecond);
  CHECK(!has(memory.json(), "it did not end"));
}

// Groups of ranks with large numbers are told from all ranks; a receive from any rank is its own.
void test_members() {
  Memory memory;
  FlightRecorder recorder;
  FlightRecorder::Owner owner = kOwner;
  owner.rank = 600;
  owner.size = 1024;
  recorder.start(memory.data(), owner, kSecond);
  recorder.begin(key_of(0), {}, *group_of({600, 601}, 600, 1024, 0), kSecond);
  CHECK(has(memory.json(), R"("ranks": [],)"));
  owner.rank = 1;
  Memory other;
  recorder.start(other.data(), owner, kSecond);
  recorder.begin(key_of(0), {}, *group_of({0, 1, 2}, 1, 1024, 0), kSecond, true);
  CHECK(has(other.json(), R"("ranks": [1],)"));
}

void test_what_is_said_of_a_work() {
  Memory memory;
  FlightRecorder recorder;
  recorder.start(memory.data(), kOwner, kSecond);
  Description description;
  description.kind = Kind::kBroadcast;
  description.dtype = DType::kInt16;
  description.root = 2;
  description.dimensions = 2;
  description.shape[0] = 3;
  description.shape[1] = 4;
  set_name(description, "w\xc3\xa9");
  const SharedGroup some = group_of({2, 1}, 1, 3, 0);
  const uint64_t number = recorder.begin({KeySpace::kName, 1, 0}, description, *some, kSecond);
  recorder.wait_begins(number, 2 * kSecond);
  recorder.wait_begins(number, 3 * kSecond);
  recorder.wait_ends(number);
  recorder.note(number, "late");
  const std::string json = memory.json();
  CHECK(has(json, R"("label": "broadcast 'wé' of the group of ranks 1 and 2", )"
                  R"("kind": "broadcast", "dtype": "int16", )"));
  CHECK(has(json, R"_("shape": "(3, 4)", "root": 2, "ranks": [1, 2], "begin": 1000.000000, )_"));
  CHECK(has(json, R"("end": null, "waited_since": 1001.000000, "why": "late"})"));
  recorder.wait_ends(number);
  CHECK(has(memory.json(), R"("waited_since": null)"));
  recorder.see(5 * kSecond);
  recorder.note_end(std::string(5000, 'x'));
  CHECK(has(memory.json(),
            R"("seen": 1004.000000, "has_thread": true, "state": "running", "why": "xxx)"));
  recorder.leave();
  CHECK(has(memory.json(), R"("state": "shutting down")"));
  recorder.stop(true);
  CHECK(has(memory.json(), R"("state": "shut down")"));
  CHECK_EQ(recorder.begin(key_of(0), {}, *some, 1), 0u);
}

// Any bytes: an error, or an answer.
void test_damaged_memory() {
  Memory memory;
  FlightRecorder recorder;
  CHECK_THROWS(memory.json(), UsageError, "it is no flight record");
  recorder.start(memory.data(), kOwner, kSecond);
  const SharedGroup all = group_of_all(1, 3);
  for (uint64_t i = 0; i < 10; ++i) recorder.begin(key_of(i), {}, *all, kSecond);
  CHECK_THROWS(FlightRecorder::json_of(memory.content().substr(0, 5000)), UsageError,
               "another version of ringdl has written it");
  for (size_t place = 24; place < 3000; ++place) {
    const std::byte before = std::exchange(memory.data()[place], std::byte{250});
    const std::string json = memory.json();
    CHECK_EQ(count(json, R"("compression": "uint8")"), count(json, R"("compression")"));
    memory.data()[place] = before;
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 200; ++i) {
    for (int bytes = 0; bytes < 50; ++bytes) {
      memory.data()[24 + random() % 8000] = static_cast<std::byte>(random());
    }
    CHECK(!memory.json().empty());
  }
  memory.data()[7] = std::byte{'0'};
  CHECK_THROWS(memory.json(), UsageError, "another version of ringdl has written it");
}

// Rank 2 lacks one of three calls, and refuses another.
void test_what_engines_record() {
  Cluster cluster(3);
  std::array<Memory, 3> memories;
  cluster.for_each([&](Engine& engine) {
    FlightRecorder::Owner owner = kOwner;
    owner.rank = engine.rank();
    engine.parts().works.recorder().start(memories[static_cast<size_t>(engine.rank())].data(),
                                          owner, cluster.clock().now_ns());
  });
  std::array<std::array<float, 3>, 3> data{};
  Call call;
  call.kind = Kind::kAllreduce;
  call.dtype = DType::kFloat32;
  call.shape = {1};
  const auto submit = [&](const std::string& name, size_t which, const std::vector<int>& ranks) {
    std::vector<std::shared_ptr<Work>> works;
    call.name = name;
    for (const int rank : ranks) {
      works.push_back(cluster[rank].submit(call, &data[static_cast<size_t>(rank)][which]));
    }
    return works;
  };
  CHECK(cluster.finish(submit("first", 0, {0, 1, 2})));
  const auto late = submit("second", 1, {0, 1});
  const auto refused = submit("third", 2, {0, 1});
  cluster[2].refuse(call, "its array is a list");
  CHECK(cluster.finish(refused));
  for (size_t rank = 0; rank < 3; ++rank) {
    const std::string json = memories[rank].json();
    CHECK_EQ(count(json, "allreduce 'first'"), 1u);
    CHECK_EQ(count(json, R"("end": null)"), rank == 2 ? 0u : 1u);
    CHECK_EQ(count(json, R"("label": "allreduce 'second'")"), rank == 2 ? 0u : 1u);
    CHECK(has(json, R"("why": "rank 2 cannot make allreduce 'third': its array is a list")"));
  }
  CHECK(cluster.finish(submit("second", 1, {2})));
  CHECK(cluster.finish(late));
}

}  // namespace

int main() {
  test_the_last_thousand_are_kept();
  test_a_wait_that_is_given_up();
  test_members();
  test_what_is_said_of_a_work();
  test_damaged_memory();
  test_what_engines_record();
  return check::report();
}
