#include "engine/diagnosis.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace ringdl {
namespace {

constexpr int64_t kBlockedNs = kSecond;
constexpr int64_t kRoundEveryNs = kSecond;
constexpr int64_t kSilentNs = 5 * kSecond;  // after which a round is given up

// Ranks that wait for a late one report at about the same time: rank 0 first collects all.
constexpr int64_t kTogetherNs = kSecond / 4;

// An idle rank polls for questions ten times a second.
constexpr int64_t kAnswerNs = kSecond / 4;

// How long, up to two thirds of the time left, a census waits for a silent rank.
constexpr int64_t kPatienceNs = 3 * kSecond / 10;
constexpr int64_t kLeastPatienceNs = 20 * kMillisecond;

// The ranks that take part, a bit each; empty if all do.
std::vector<uint8_t> to_bits(const std::vector<int>& ranks, int size) {
  if (ranks.size() == static_cast<size_t>(size)) return {};
  std::vector<uint8_t> bits(static_cast<size_t>(size + 7) / 8);
  for (const int rank : ranks) bits[static_cast<size_t>(rank) / 8] |= 1u << rank % 8;
  return bits;
}

std::vector<int> from_bits(const std::byte* bits, size_t bytes, int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) {
    const auto byte = static_cast<size_t>(rank) / 8;
    const bool takes_part =
        bytes == 0 || (byte < bytes && (std::to_integer<int>(bits[byte]) >> rank % 8 & 1) != 0);
    if (takes_part) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

Diagnosis::Diagnosis(Owner& owner, Transport& transport, ControlPlane& control)
    : owner_(owner),
      transport_(transport),
      control_(control),
      rank_(transport.rank()),
      size_(transport.size()),
      census_(*this, control),
      reports_(rank_ == 0 ? static_cast<size_t>(size_) : 0) {}

void Diagnosis::wait_begins(const Key& key, const std::string& label, const SharedGroup& group,
                            bool for_good, int64_t now) {
  waits_.push_back({key, label, group->ranks, group, for_good});
  ++serial_;
  since_ns_ = now;
}

void Diagnosis::wait_ends(const Key& key, int64_t now) {
  const auto wait = std::find_if(waits_.begin(), waits_.end(),
                                 [&](const Wait& candidate) { return candidate.key == key; });
  if (wait != waits_.end()) waits_.erase(wait);
  ++serial_;
  since_ns_ = now;
}

void Diagnosis::check(const Key& key, bool may_submit, int64_t now) {
  if (size_ == 1 || now - since_ns_ < kBlockedNs) return;
  const auto wait = std::find_if(waits_.begin(), waits_.end(),
                                 [&](const Wait& candidate) { return candidate.key == key; });
  const bool is_blocked = wait != waits_.end() && wait->for_good && !may_submit;
  if (is_blocked && sent_serial_ != serial_) {
    sent_serial_ = serial_;
    report(rank_, serial_, *wait, now);
  }
  count_where_ranks_left(now);
}

void Diagnosis::detect_stuck(int64_t now) {
  if (!round_.empty() && now - round_begin_ns_ >= kSilentNs) {  // does not wait for a silent rank
    for (const uint32_t number : std::exchange(round_, {})) forget(number);
    is_round_wanted_ = true;
  }
  if (!is_round_wanted_ || !round_.empty() || now < next_round_ns_) return;
  is_round_wanted_ = false;
  next_round_ns_ = now + kRoundEveryNs;
  round_begin_ns_ = now;
  begin_round(now);
}

void Diagnosis::count_where_ranks_left(int64_t now) {
  const std::vector<bool>& has_left = owner_.left();
  const auto left = std::count(has_left.begin(), has_left.end(), true);
  if (left == 0 || (asked_serial_ == serial_ && asked_left_ == left)) return;
  asked_serial_ = serial_;
  asked_left_ = left;
  transport_.expect_stray_messages();
  for (const Wait& wait : std::vector<Wait>(waits_)) {
    const bool has_one = std::ranges::any_of(
        wait.ranks, [&](int rank) { return has_left[static_cast<size_t>(rank)]; });
    if (has_one) census_.begin(wait.key, wait.group, kPatienceNs, now);
  }
}

void Diagnosis::on_missing(const Key& key, int rank) {
  if (owner_.left()[static_cast<size_t>(rank)]) owner_.fail_for_left(key, rank);
}

void Diagnosis::report(int rank, uint64_t serial, const Wait& wait, int64_t now) {
  if (rank_ == 0) {
    reports_[static_cast<size_t>(rank)] = {serial, wait};
    if (!is_round_wanted_) next_round_ns_ = std::max(next_round_ns_, now + kTogetherNs);
    is_round_wanted_ = true;
    return;
  }
  MessageHead head;
  head.type = MessageType::kBlocked;
  head.key = wait.key;
  head.value = serial;
  Description description;
  set_name(description, wait.label);
  const std::vector<uint8_t> bits = to_bits(wait.ranks, size_);
  control_.send(0, head, &description, bits.data(), bits.size());
}

void Diagnosis::on_blocked(const ControlMessage& message, int64_t now) {
  report(message.from, message.head.value,
         {message.head.key, message.description.name,
          from_bits(message.payload, message.head.payload_bytes, size_), nullptr, true},
         now);
}

uint32_t Diagnosis::ask_all(const Key& key, const SharedGroup& group, int64_t within, int64_t now) {
  transport_.expect_stray_messages();  // answers, after this rank has shut down
  const uint32_t number = next_question_++;
  Question& question = questions_[number];
  question.key = key;
  question.asked_ns = now;
  question.counted = group;
  census_.keep(key);
  census_.begin(key, group, std::clamp(within / 3 * 2, kLeastPatienceNs, kPatienceNs), now);
  return number;
}

void Diagnosis::ask_who_left(const Key& key, int rank, int64_t now) {
  questions_[ask(key, {rank}, now)].ends_when_answered = true;
}

void Diagnosis::forget(uint32_t number) {
  const auto found = questions_.find(number);
  if (found == questions_.end()) return;
  if (found->second.counted) census_.release(found->second.key);
  questions_.erase(found);
}

uint32_t Diagnosis::ask(const Key& key, const std::vector<int>& ranks, int64_t now) {
  transport_.expect_stray_messages();  // answers, after this rank has shut down
  const uint32_t number = next_question_++;
  Question& question = questions_[number];
  question.key = key;
  question.answers.assign(static_cast<size_t>(size_), Answer::kNotAsked);
  question.asked_ns = now;
  for (const int rank : ranks) question.answers[static_cast<size_t>(rank)] = Answer::kNone;
  MessageHead head;
  head.type = MessageType::kQuery;
  head.key = key;
  head.sequence = number;
  bool asks_itself = false;
  for (const int to : ranks) {
    if (to == rank_) {
      asks_itself = true;
    } else {
      control_.send(to, head);
    }
  }
  if (asks_itself) take(rank_, number, !owner_.is_ahead(key), waits_.empty() ? 0 : serial_);
  return number;
}

void Diagnosis::on_query(const ControlMessage& message) {
  MessageHead head;
  head.type = MessageType::kAnswer;
  head.key = message.head.key;
  head.sequence = message.head.sequence;
  head.flag = owner_.is_ahead(message.head.key) ? 0 : 1;
  head.value = waits_.empty() ? 0 : serial_;
  control_.send(message.from, head);
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
    const Key key = question->second.key;
    if (question->second.ends_when_answered) forget(number);
    if (!submitted) on_missing(key, rank);
    return;
  }
  Report& report = reports_[static_cast<size_t>(rank)];
  if (report.serial != serial) report.serial = 0;  // it reports when it is blocked again
  for (const uint32_t asked : round_) {
    const auto& answers = questions_[asked].answers;
    if (std::find(answers.begin(), answers.end(), Answer::kNone) != answers.end()) return;
  }
  end_round();
}

std::vector<Diagnosis::Answer> Diagnosis::answers_to(const Question& question) const {
  if (!question.counted) return question.answers;
  std::vector<Answer> answers(static_cast<size_t>(size_), Answer::kNotAsked);
  const std::vector<Standing> standings = census_.standings(question.key);
  for (size_t member = 0; member < question.counted->ranks.size(); ++member) {
    const Standing standing = member < standings.size() ? standings[member] : Standing::kUnknown;
    answers[static_cast<size_t>(question.counted->ranks[member])] =
        standing == Standing::kSubmitted ? Answer::kSubmitted
        : standing == Standing::kMissing ? Answer::kMissing
                                         : Answer::kNone;
  }
  return answers;
}

int Diagnosis::first_submitted(uint32_t number) const {
  const std::vector<Answer> answers = answers_to(questions_.at(number));
  const auto first = std::find(answers.begin(), answers.end(), Answer::kSubmitted);
  return first == answers.end() ? -1 : static_cast<int>(first - answers.begin());
}

std::string Diagnosis::answers(uint32_t number, int64_t now) const {
  std::vector<int> missing;
  std::vector<int> silent;
  const std::vector<Answer> answers = answers_to(questions_.at(number));
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    if (answers[rank] == Answer::kMissing) missing.push_back(static_cast<int>(rank));
    if (answers[rank] == Answer::kNone) silent.push_back(static_cast<int>(rank));
  }
  std::string text;
  if (!missing.empty()) {
    text = ranks_text(missing) + (missing.size() == 1 ? " has" : " have") + " not arrived";
  }
  if (!silent.empty()) {
    if (!text.empty()) text += " and ";
    text += ranks_text(silent) + (now - questions_.at(number).asked_ns < kAnswerNs
                                      ? " did not answer in so short a time"
                                      : " did not answer (stopped, starved of CPU time, or "
                                        "computing without a progress thread)");
  }
  return text.empty() ? "all ranks have arrived" : text;
}

// A rank may be stuck only if a member of its group that waits for another key may be stuck: only
// such a member may have missed the rank's key and be stuck. Mostly all wait for a rank that does
// not wait, and nobody has to be asked.
std::vector<Diagnosis::Wait> Diagnosis::waits_that_may_be_stuck() {
  if (reports_[0].serial != serial_) reports_[0].serial = 0;
  std::vector<bool> may_be;
  for (const Report& report : reports_) may_be.push_back(report.serial != 0);
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t rank = 0; rank < reports_.size(); ++rank) {
      if (!may_be[rank]) continue;
      const Wait& wait = reports_[rank].wait;
      may_be[rank] = std::ranges::any_of(wait.ranks, [&](int other) {
        const auto at = static_cast<size_t>(other);
        return may_be[at] && reports_[at].wait.key != wait.key;
      });
      changed |= !may_be[rank];
    }
  }
  std::vector<Wait> waits;
  for (size_t rank = 0; rank < reports_.size(); ++rank) {
    const Wait& wait = reports_[rank].wait;
    const bool is_known =
        std::ranges::any_of(waits, [&](const Wait& other) { return other.key == wait.key; });
    if (may_be[rank] && !is_known) waits.push_back(wait);
  }
  return waits;
}

// The questions are numbered before they are asked: the last answer, perhaps this rank's own, ends
// the round.
void Diagnosis::begin_round(int64_t now) {
  const std::vector<Wait> waits = waits_that_may_be_stuck();
  for (size_t i = 0; i < waits.size(); ++i) {
    round_.push_back(next_question_ + static_cast<uint32_t>(i));
  }
  for (const Wait& wait : waits) {
    const uint32_t number = ask(wait.key, wait.ranks, now);
    questions_[number].for_verdict = true;
  }
  for (const uint32_t number : std::vector<uint32_t>(round_)) {
    if (round_.empty()) return;
    const Question& question = questions_[number];
    if (question.answers[0] == Answer::kNotAsked) continue;
    take(0, number, !owner_.is_ahead(question.key), waits_.empty() ? 0 : serial_);
  }
}

// A rank is stuck if it is blocked and all ranks that have not submitted its key are stuck, too: of
// all blocked ranks, those that are not stuck are removed until none is left to remove. Each was in
// the same wait when the round began: it reported the wait before and was still in it when it
// answered. So it will never submit what it had not submitted then. (To know one stuck rank would
// be enough, but the others could not know then whether to skip the key.)
std::vector<bool> Diagnosis::find_stuck(const std::vector<Question>& round) const {
  const auto size = static_cast<size_t>(size_);
  std::vector<const Question*> awaited(size, nullptr);
  std::vector<bool> stuck(size, false);
  for (size_t rank = 0; rank < size; ++rank) {
    for (const Question& question : round) {
      if (question.key == reports_[rank].wait.key) awaited[rank] = &question;
    }
    stuck[rank] = reports_[rank].serial != 0 && awaited[rank] != nullptr;
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t rank = 0; rank < size; ++rank) {
      if (!stuck[rank]) continue;
      bool is_missing = false;
      bool is_late = false;
      for (size_t other = 0; other < size; ++other) {
        if (awaited[rank]->answers[other] != Answer::kMissing) continue;
        is_missing = true;
        is_late |= !stuck[other];
      }
      if (is_missing && !is_late) continue;
      stuck[rank] = false;
      changed = true;
    }
  }
  return stuck;
}

void Diagnosis::end_round() {
  std::vector<Question> round;
  for (const uint32_t number : std::exchange(round_, {})) {
    round.push_back(std::move(questions_[number]));
    questions_.erase(number);
  }
  const std::vector<bool> stuck = find_stuck(round);
  const auto waits_for = [&](size_t rank, const Question& question) {
    return stuck[rank] && reports_[rank].wait.key == question.key;
  };
  std::string why;
  std::erase_if(round, [&](const Question& question) {
    std::vector<int> missing;
    std::vector<int> waiting;
    std::string label;
    for (size_t rank = 0; rank < stuck.size(); ++rank) {
      if (question.answers[rank] == Answer::kMissing) missing.push_back(static_cast<int>(rank));
      if (!waits_for(rank, question)) continue;
      waiting.push_back(static_cast<int>(rank));
      label = reports_[rank].wait.label;
    }
    if (waiting.empty()) return true;
    why += ranks_text(waiting) + (waiting.size() == 1 ? " waits" : " wait") + " for " + label +
           ", which " + ranks_text(missing) + " never submitted; ";
    return false;
  });
  if (round.empty()) return;
  why = "ranks wait for one another, each for what another one has not submitted: " + why +
        "have all ranks make the same calls, under the same names";
  const bool is_training = std::any_of(round.begin(), round.end(), [](const Question& question) {
    return question.key.space == KeySpace::kBucket;
  });
  if (is_training) why += "; a rank that has no batch left calls join()";
  // A rank goes on as soon as what it waits for fails, so it is first sent what to skip.
  for (const Answer answer : {Answer::kMissing, Answer::kSubmitted}) {
    for (const Question& question : round) {
      for (size_t rank = 0; rank < stuck.size(); ++rank) {
        if (question.answers[rank] != answer) continue;
        owner_.send_verdict(static_cast<int>(rank), question.key, why);
      }
    }
  }
}

}  // namespace ringdl
