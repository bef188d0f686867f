use super::*;

/// Callers that each ask again as soon as they are answered.
struct Callers {
    count: usize,
    /// What a run takes that is alone, and how fast each of two is, as a share of that.
    alone: Duration,
    beside: f64,
}

impl Callers {
    /// Goes on for so long; what was answered, and how many runs may be under way in the end.
    fn call(&self, decision: &mut SideBySide, from: Timestamp, time: Duration) -> (u32, usize) {
        let step = self.alone / 40;
        let (mut now, mut answered) = (from, 0);
        let mut running: Vec<f64> = Vec::new();
        while now < from + time {
            while running.len() < decision.limit().min(self.count) {
                decision.started(now);
                running.push(1.0);
            }
            let speed = if running.len() > 1 { self.beside } else { 1.0 };
            let done = speed * step.as_secs_f64() / self.alone.as_secs_f64();
            now = now + step;
            for left in &mut running {
                *left -= done;
            }
            while let Some(place) = running.iter().position(|left| *left <= 1e-9) {
                running.remove(place);
                answered += 1;
                let others_wait = self.count > running.len() + 1;
                decision.finished(1, others_wait, now);
            }
        }
        while running.pop().is_some() {
            decision.finished(1, false, now);
        }
        (answered, decision.limit())
    }
}

const RUN: Duration = Duration::from_millis(10);
const LONG: Duration = Duration::from_secs(20);

fn callers(count: usize, beside: f64) -> Callers {
    Callers {
        count,
        alone: RUN,
        beside,
    }
}

#[test]
fn runs_that_hold_each_other_up_go_one_at_a_time() {
    let mut decision = SideBySide::learning(2);
    let (answered, limit) = callers(8, 0.4).call(&mut decision, Timestamp::ZERO, LONG);
    assert_eq!(limit, 1);
    // 2,000 fit one at a time, 1,600 side by side.
    assert!(answered > 1_950, "{answered}");
}

#[test]
fn runs_that_leave_each_other_alone_stay_side_by_side() {
    let mut decision = SideBySide::learning(2);
    let (answered, limit) = callers(8, 0.95).call(&mut decision, Timestamp::ZERO, LONG);
    assert_eq!(limit, 2);
    // 3,800 fit side by side; the trial takes little of it.
    assert!(answered > 3_600, "{answered}");
}

#[test]
fn nothing_is_tried_where_the_number_does_not_matter() {
    let mut decision = SideBySide::learning(2);
    let (_, limit) = callers(1, 0.4).call(&mut decision, Timestamp::ZERO, LONG);
    assert_eq!(limit, 2);
    assert_eq!(decision.last_verdict, None);
}

#[test]
fn a_verdict_is_looked_at_again() {
    let mut decision = SideBySide::learning(2);
    let half_an_hour = Duration::from_secs(1_800);
    callers(8, 0.4).call(&mut decision, Timestamp::ZERO, half_an_hour);
    assert_eq!(decision.limit(), 1);
    assert_eq!(decision.hold, LONGEST_HOLD);
    // Say the model was given fewer threads.
    let later = Timestamp::ZERO + half_an_hour + RUN;
    callers(8, 0.95).call(&mut decision, later, half_an_hour);
    assert_eq!(decision.limit(), 2);
}

#[test]
fn a_machine_that_slows_down_meanwhile_does_not_decide() {
    let mut decision = SideBySide::learning(2);
    let mut now = Timestamp::ZERO;
    let mut model = callers(8, 0.53);
    // Six per cent more side by side, while everything slows down by a fifth.
    while decision.last_verdict.is_none() {
        let piece = Duration::from_millis(100);
        model.call(&mut decision, now, piece);
        now = now + piece;
        model.alone = model.alone.mul_f64(1.02);
    }
    assert_eq!(decision.limit(), 2);
}

#[test]
fn a_verdict_outlives_a_lull() {
    let mut decision = SideBySide::learning(2);
    callers(8, 0.4).call(&mut decision, Timestamp::ZERO, LONG);
    let later = Timestamp::ZERO + LONG + RUN;
    callers(1, 0.4).call(&mut decision, later, Duration::from_secs(300));
    assert_eq!(decision.limit(), 1);
}

#[test]
fn another_session_is_tried_anew_unless_a_verdict_stands() {
    let mut decision = SideBySide::learning(2);
    let briefly = Duration::from_millis(300);
    callers(8, 0.4).call(&mut decision, Timestamp::ZERO, briefly);
    assert_eq!(decision.stage, Stage::Apart);
    decision.restart();
    assert_eq!(decision.stage, Stage::Together);
    callers(8, 0.4).call(&mut decision, Timestamp::ZERO + briefly + RUN, LONG);
    decision.restart();
    assert_eq!(decision.limit(), 1);
}

#[test]
fn what_somebody_said_is_left_alone() {
    let mut decision = SideBySide::fixed(2);
    callers(8, 0.4).call(&mut decision, Timestamp::ZERO, LONG);
    assert_eq!(decision.limit(), 2);
    assert_eq!(SideBySide::learning(1).limit(), 1);
    assert_eq!(SideBySide::fixed(0).limit(), 1);
}
