#include "engine/diagnosis.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "engine/engine.h"

namespace ringdl {
namespace {

constexpr int64_t kBlockedNs = kSecond;
constexpr int64_t kRoundEveryNs = kSecond;

// An idle rank looks for questions ten times a second.
constexpr int64_t kAnswerNs = kSecond / 4;

}  // namespace

std::string ranks_text(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return "rank " + std::to_string(ranks[0]);
  std::string text = "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += last + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
    if (last > i + 1) {
      text += " to " + std::to_string(ranks[last]);
      i = last;
    }
  }
  return text;
}

Diagnosis::Diagnosis(Engine& engine)
    : engine_(engine), reports_(static_cast<size_t>(engine.size_)) {}

void Diagnosis::wait_begins(const Key& key, const std::string& label, int64_t now) {
  waits_.push_back({key, label});
  ++serial_;
  since_ns_ = now;
}

void Diagnosis::wait_ends(const Key& key) {
  const auto wait = std::find_if(waits_.begin(), waits_.end(),
                                 [&](const Wait& candidate) { return candidate.key == key; });
  if (wait != waits_.end()) waits_.erase(wait);
  for (const uint32_t number : std::exchange(left_questions_, {})) forget(number);
  ++serial_;
  since_ns_ = now_ns();
}

void Diagnosis::look(int64_t now) {
  if (engine_.size_ == 1 || waits_.empty() || now - since_ns_ < kBlockedNs) return;
  const bool may_submit = !engine_.one_submitter_ && !engine_.shutting_down_;
  if (!may_submit && told_serial_ != serial_) {
    told_serial_ = serial_;
    report(engine_.rank_, serial_, waits_.front());
  }
  ask_those_who_left(now);
  if (engine_.rank_ != 0 || !round_.empty() || now < next_round_ns_) return;
  const bool all_blocked = std::all_of(reports_.begin(), reports_.end(),
                                       [](const Report& report) { return report.serial != 0; });
  if (!all_blocked) return;
  next_round_ns_ = now + kRoundEveryNs;
  begin_round(now);
}

void Diagnosis::ask_those_who_left(int64_t now) {
  const auto left = std::count(engine_.left_.begin(), engine_.left_.end(), true);
  if (left == 0 || (asked_serial_ == serial_ && asked_left_ == left)) return;
  asked_serial_ = serial_;
  asked_left_ = left;
  const std::vector<Wait> waits = waits_;
  for (const Wait& wait : waits) left_questions_.push_back(ask_all(wait.key, now));
}

void Diagnosis::report(int rank, uint64_t serial, const Wait& wait) {
  if (engine_.rank_ == 0) {
    reports_[static_cast<size_t>(rank)] = {serial, wait};
    return;
  }
  MessageHead head;
  head.type = MessageType::kBlocked;
  head.key = wait.key;
  head.value = serial;
  Description description;
  set_name(description, wait.label);
  engine_.control_->send(0, head, &description);
}

void Diagnosis::on_blocked(const ControlMessage& message) {
  report(message.from, message.head.value, {message.head.key, message.description.name});
}

uint32_t Diagnosis::ask_all(const Key& key, int64_t now) {
  engine_.transport_->expect_stray_messages();  // answers, after this rank has shut down
  const uint32_t number = next_question_++;
  questions_[number] = {key, std::vector<Answer>(reports_.size(), Answer::kNone), now, false};
  MessageHead head;
  head.type = MessageType::kQuery;
  head.key = key;
  head.sequence = number;
  for (int to = 0; to < engine_.size_; ++to) {
    if (to != engine_.rank_) engine_.control_->send(to, head);
  }
  take(engine_.rank_, number, engine_.submitted(key), waits_.empty() ? 0 : serial_);
  return number;
}

void Diagnosis::on_query(const ControlMessage& message) {
  MessageHead head;
  head.type = MessageType::kAnswer;
  head.key = message.head.key;
  head.sequence = message.head.sequence;
  head.flag = engine_.submitted(message.head.key) ? 1 : 0;
  head.value = waits_.empty() ? 0 : serial_;
  engine_.control_->send(message.from, head);
}

void Diagnosis::on_answer(const ControlMessage& message) {
  take(message.from, message.head.sequence, message.head.flag != 0, message.head.value);
}

void Diagnosis::take(int rank, uint32_t number, bool submitted, uint64_t serial) {
  const auto question = questions_.find(number);
  if (question == questions_.end()) return;  // the wait has ended
  question->second.answers[static_cast<size_t>(rank)] =
      submitted ? Answer::kSubmitted : Answer::kMissing;
  if (!question->second.for_verdict) {
    if (!submitted && engine_.left_[static_cast<size_t>(rank)]) {
      const Key key = question->second.key;
      engine_.fail_for_left(key, rank);
    }
    return;
  }
  Report& report = reports_[static_cast<size_t>(rank)];
  if (report.serial != serial) {  // it has moved on; it will tell when it is blocked again
    report.serial = 0;
    round_spoiled_ = true;
  }
  for (const uint32_t asked : round_) {
    const auto& answers = questions_[asked].answers;
    if (std::find(answers.begin(), answers.end(), Answer::kNone) != answers.end()) return;
  }
  end_round();
}

std::string Diagnosis::answers(uint32_t number, int64_t now) const {
  std::vector<int> missing;
  std::vector<int> silent;
  const std::vector<Answer>& answers = questions_.at(number).answers;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    if (answers[rank] == Answer::kMissing) missing.push_back(static_cast<int>(rank));
    if (answers[rank] == Answer::kNone) silent.push_back(static_cast<int>(rank));
  }
  std::string text;
  if (!missing.empty()) {
    text = ranks_text(missing) + (missing.size() == 1 ? " has" : " have") + " not come";
  }
  if (!silent.empty()) {
    if (!text.empty()) text += " and ";
    text += ranks_text(silent) + (now - questions_.at(number).asked_ns < kAnswerNs
                                      ? " did not answer in so short a time"
                                      : " did not answer (stopped, or computing without a "
                                        "progress thread)");
  }
  return text.empty() ? "all ranks have come" : text;
}

void Diagnosis::begin_round(int64_t now) {
  round_spoiled_ = false;
  std::vector<Key> keys;
  for (const Report& report : reports_) {
    if (std::find(keys.begin(), keys.end(), report.wait.key) == keys.end()) {
      keys.push_back(report.wait.key);
    }
  }
  // Numbers first: the last answer, perhaps this rank's own, ends the round.
  for (size_t i = 0; i < keys.size(); ++i) {
    round_.push_back(next_question_ + static_cast<uint32_t>(i));
  }
  for (const Key& key : keys) questions_[ask_all(key, now)].for_verdict = true;
  for (const uint32_t asked : round_) {
    take(0, asked, engine_.submitted(questions_[asked].key), waits_.empty() ? 0 : serial_);
    if (round_.empty()) return;
  }
}

void Diagnosis::end_round() {
  std::vector<Question> round;
  for (const uint32_t number : std::exchange(round_, {})) {
    round.push_back(std::move(questions_[number]));
    questions_.erase(number);
  }
  if (round_spoiled_) return;
  std::string why = "every rank waits and nothing that is waited for was submitted everywhere: ";
  for (const Question& question : round) {
    std::vector<int> missing;
    std::vector<int> waiting;
    std::string label;
    for (size_t rank = 0; rank < reports_.size(); ++rank) {
      if (question.answers[rank] == Answer::kMissing) missing.push_back(static_cast<int>(rank));
      if (reports_[rank].wait.key == question.key) {
        waiting.push_back(static_cast<int>(rank));
        label = reports_[rank].wait.label;
      }
    }
    if (missing.empty()) return;  // it is on its way, or stalled for another reason
    why += ranks_text(waiting) + (waiting.size() == 1 ? " waits" : " wait") + " for " + label +
           ", which " + ranks_text(missing) + " never submitted; ";
  }
  why += "have all ranks make the same calls, under the same names";
  // A rank goes on as soon as what it waits for fails, so it first hears what it has to skip.
  for (const Answer answer : {Answer::kMissing, Answer::kSubmitted}) {
    for (const Question& question : round) {
      for (int rank = 0; rank < engine_.size_; ++rank) {
        if (question.answers[static_cast<size_t>(rank)] == answer) {
          engine_.tell_failure(rank, MessageType::kVerdict, question.key, why);
        }
      }
    }
  }
}

}  // namespace ringdl
