//! The batcher, the profile and admission together, against a simulated model in virtual time.

use std::collections::VecDeque;

use super::*;
use crate::batch::{BatchItem, BatchPolicy, Batcher, QueuePolicy, Waiting};

const DEADLINE: Duration = Duration::from_secs(1);
const WINDOW: u64 = 5;

#[derive(Debug)]
struct Request {
    deadline: Timestamp,
}

impl BatchItem for Request {
    fn rows(&self) -> u32 {
        1
    }

    fn can_join(&self, _: &Self) -> bool {
        true
    }
}

/// A small generator with a fixed seed: the simulation is the same every time.
struct Noise(u64);

impl Noise {
    /// Uniform between 0 and 1.
    fn unit(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

struct Scenario<F> {
    seed: u64,
    /// Seconds of arrivals.
    length: u64,
    arrivals_per_second: f64,
    max_rows: u32,
    concurrency: usize,
    /// Mean seconds of a run of so many rows that starts at so many seconds; ±20 % are added.
    service: F,
}

#[derive(Debug)]
struct Outcome {
    /// Answers in time, by five-second window.
    answered: Vec<u32>,
    /// Answers that came too late and were dropped.
    late: u32,
    /// Admitted, then given up in the queue.
    expired: u32,
    refused: u32,
}

struct Run {
    started: Timestamp,
    ends: Timestamp,
    requests: Vec<Request>,
}

fn simulate(scenario: &Scenario<impl Fn(f64, u32) -> f64>) -> Outcome {
    let mut noise = Noise(scenario.seed);
    let mut batcher = Batcher::new(BatchPolicy {
        max_rows: scenario.max_rows,
        preferred_rows: Vec::new(),
        max_delay: Duration::ZERO,
        levels: vec![QueuePolicy::default()],
        default_level: 1,
    });
    let mut profile = ServiceProfile::new();
    let mut running: VecDeque<Run> = VecDeque::new();
    let mut outcome = Outcome {
        answered: vec![0; (scenario.length / WINDOW) as usize],
        late: 0,
        expired: 0,
        refused: 0,
    };
    let end = Timestamp::ZERO + Duration::from_secs(scenario.length);
    let mut arrival = Timestamp::from_nanos(1);
    loop {
        let next_end = running.iter().map(|run| run.ends).min();
        let now = match next_end {
            Some(ends) if ends <= arrival => ends,
            _ if arrival < end => arrival,
            _ => return outcome,
        };
        if next_end == Some(now) {
            let index = running.iter().position(|run| run.ends == now).unwrap();
            let run = running.remove(index).unwrap();
            profile.record_run(run.requests.len() as u32, now - run.started);
            for request in run.requests {
                let window = (now.as_nanos() / 1_000_000_000 / WINDOW) as usize;
                match outcome.answered.get_mut(window) {
                    _ if now > request.deadline => outcome.late += 1,
                    Some(answered) => *answered += 1,
                    None => {}
                }
                profile.waited_with_success();
            }
        } else {
            let deadline = now + DEADLINE;
            let outlook = Outlook {
                queued_rows: batcher.queued_rows(),
                running: running.len(),
                concurrency: scenario.concurrency,
                max_rows: scenario.max_rows,
                running_since: running.iter().map(|run| run.started).min(),
                load_remaining: None,
            };
            match admit(&outlook, &profile, 1, Some(deadline), now) {
                Ok(()) => {
                    let waiting = Waiting {
                        item: Request { deadline },
                        priority: 0,
                        deadline: Some(deadline),
                        timeout: None,
                    };
                    batcher.push(waiting, now).unwrap();
                }
                Err(_) => outcome.refused += 1,
            }
            let gap = -(1.0 - noise.unit()).ln() / scenario.arrivals_per_second;
            arrival = now + Duration::from_secs_f64(gap) + Duration::from_nanos(1);
        }
        for _ in batcher.expire(now) {
            outcome.expired += 1;
            profile.waited_in_vain();
        }
        while running.len() < scenario.concurrency
            && let Some(batch) = batcher.take_batch(now, |rows| profile.cautious_run(rows))
        {
            let mean = (scenario.service)(now.as_nanos() as f64 / 1e9, batch.rows);
            let took = mean * (0.8 + 0.4 * noise.unit());
            running.push_back(Run {
                started: now,
                ends: now + Duration::from_secs_f64(took),
                requests: batch.entries.into_iter().map(|(_, item, _)| item).collect(),
            });
        }
    }
}

/// A model of one slot that answers one request in 100 ms, called ten times as often.
fn flooded<F: Fn(f64, u32) -> f64>(seed: u64, service: F) -> Scenario<F> {
    Scenario {
        seed,
        length: 30,
        arrivals_per_second: 100.0,
        max_rows: 1,
        concurrency: 1,
        service,
    }
}

/// Simulates with several seeds; in each window at least so many answers must come in time.
fn check<F: Fn(f64, u32) -> f64>(scenario: impl Fn(u64) -> Scenario<F>, floor: [u32; 6]) {
    for seed in 1..=10 {
        let outcome = simulate(&scenario(seed));
        let enough = |(answered, floor): (&u32, u32)| *answered >= floor;
        assert!(
            outcome.answered.iter().zip(floor).all(enough),
            "seed {seed}: {outcome:?}"
        );
        // What is answered too late is wasted; next to nothing may be.
        assert!(outcome.late <= 2, "seed {seed}: {outcome:?}");
    }
}

#[test]
fn ten_times_the_capacity_costs_no_goodput() {
    // 50 in five seconds, less 5 %.
    check(|seed| flooded(seed, |_, _| 0.1), [48; 6]);
}

#[test]
fn ten_times_the_capacity_costs_no_goodput_of_a_batching_model() {
    // Sixteen rows in 100 ms on two slots make 1600 in five seconds.
    let scenario = |seed| Scenario {
        arrivals_per_second: 3200.0,
        max_rows: 16,
        concurrency: 2,
        ..flooded(seed, |_, rows| 0.02 + 0.005 * f64::from(rows))
    };
    check(scenario, [1520; 6]);
}

#[test]
fn goodput_follows_a_service_time_that_doubles_and_halves() {
    let service = |now, _| {
        if (10.0..20.0).contains(&now) {
            0.2
        } else {
            0.1
        }
    };
    check(|seed| flooded(seed, service), [48, 48, 22, 24, 47, 48]);
}

#[test]
fn one_stalled_run_is_soon_forgotten() {
    // The run that starts then takes four seconds.
    let service = |now, _| {
        if (9.9..10.05).contains(&now) {
            4.0
        } else {
            0.1
        }
    };
    check(|seed| flooded(seed, service), [47, 47, 0, 46, 47, 47]);
}

#[test]
fn few_wait_in_vain_on_a_machine_whose_speed_moves() {
    // Half as fast for every other second or so, as with a neighbour that comes and goes.
    let service = |now: f64, _| {
        if (now * 0.9).fract() < 0.5 {
            0.005
        } else {
            0.01
        }
    };
    for seed in 1..=10 {
        let outcome = simulate(&Scenario {
            arrivals_per_second: 1500.0,
            ..flooded(seed, service)
        });
        let answered: u32 = outcome.answered.iter().sum();
        assert!(outcome.expired * 50 < answered, "seed {seed}: {outcome:?}");
        // Half of the time 200 in a second, half of it 100, less 5 %.
        let enough = |answered: &u32| *answered >= 712;
        assert!(
            outcome.answered.iter().all(enough),
            "seed {seed}: {outcome:?}"
        );
    }
}

#[test]
fn light_load_is_admitted_whole() {
    for seed in 1..=10 {
        let outcome = simulate(&Scenario {
            arrivals_per_second: 5.0,
            ..flooded(seed, |_, _| 0.1)
        });
        let lost = outcome.late + outcome.expired + outcome.refused;
        assert_eq!(lost, 0, "seed {seed}: {outcome:?}");
    }
}
