//! When requests are due in an open loop.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::dice::Dice;
use super::scenario::{Arrivals, Bursts, Open, TraceSource};
use crate::simulate::trace::{Arrivals as Within, Trace};

/// A request that is due.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Due {
    /// From the start of the load.
    pub(crate) at: Duration,
    /// Which model, where the arrivals say so; by weight otherwise.
    pub(crate) model: Option<usize>,
}

/// The moments at which requests are due, in order; ends with a trace, else never.
#[derive(Debug)]
pub(crate) enum Schedule {
    Poisson { next: f64, rate: f64, dice: Dice },
    Constant { index: u64, rate: f64 },
    Bursts(BurstSchedule),
    Trace(std::vec::IntoIter<Due>),
}

/// Bursts, and independent requests in between.
#[derive(Debug)]
pub(crate) struct BurstSchedule {
    bursts: Bursts,
    /// Which burst comes next, and how many of it have come.
    burst: u32,
    place: usize,
    between: Option<(Duration, Box<Schedule>)>,
}

impl Schedule {
    /// The arrivals of a step. `names` are the models that a trace may name.
    pub(crate) fn new(open: &Open, rate: f64, names: &[&str], dice: Dice) -> Result<Self> {
        let poisson = |dice: Dice| Self::Poisson {
            next: 0.0,
            rate,
            dice,
        };
        Ok(match open.arrivals {
            Arrivals::Poisson => poisson(dice),
            Arrivals::Constant => Self::Constant { index: 0, rate },
            Arrivals::Bursts => {
                let bursts = open.bursts.clone().context("open.bursts is missing")?;
                let between = (rate > 0.0).then(|| {
                    let mut schedule = poisson(dice);
                    let first = schedule.next().map_or(Duration::MAX, |due| due.at);
                    (first, Box::new(schedule))
                });
                Self::Bursts(BurstSchedule {
                    bursts,
                    burst: 0,
                    place: 0,
                    between,
                })
            }
            Arrivals::Trace => {
                let source = open.trace.as_ref().context("open.trace is missing")?;
                Self::Trace(trace(source, names, dice)?.into_iter())
            }
        })
    }
}

impl Iterator for Schedule {
    type Item = Due;

    fn next(&mut self) -> Option<Due> {
        let at = match self {
            Self::Poisson { next, rate, dice } => {
                *next += dice.exponential() / *rate;
                Duration::try_from_secs_f64(*next).ok()?
            }
            Self::Constant { index, rate } => {
                let at = *index as f64 / *rate;
                *index += 1;
                Duration::try_from_secs_f64(at).ok()?
            }
            Self::Bursts(schedule) => schedule.next()?,
            Self::Trace(dues) => return dues.next(),
        };
        Some(Due { at, model: None })
    }
}

impl BurstSchedule {
    fn next(&mut self) -> Option<Duration> {
        let burst = self.bursts.every.checked_mul(self.burst)?;
        if let Some((due, schedule)) = &mut self.between
            && *due < burst
        {
            let now = *due;
            *due = schedule.next().map_or(Duration::MAX, |due| due.at);
            return Some(now);
        }
        self.place += 1;
        if self.place == self.bursts.size {
            self.place = 0;
            self.burst += 1;
        }
        Some(burst)
    }
}

/// The requests of a recorded trace, compressed in time.
fn trace(source: &TraceSource, names: &[&str], mut dice: Dice) -> Result<Vec<Due>> {
    let mut dues = match &source.file {
        Some(path) => match single_calls(path, names)? {
            Some(dues) => dues,
            None => counted_calls(Trace::open(path)?, source, names.len(), &mut dice),
        },
        None => counted_calls(Trace::bundled()?, source, names.len(), &mut dice),
    };
    dues.retain(|due| due.at >= source.start);
    for due in &mut dues {
        due.at = (due.at - source.start).div_f64(source.speed);
    }
    dues.sort_by_key(|due| due.at);
    ensure!(!dues.is_empty(), "the trace has no calls from its start on");
    Ok(dues)
}

/// Lines `SECONDS` or `SECONDS,MODEL`; none when the file does not begin like that.
fn single_calls(path: &Path, names: &[&str]) -> Result<Option<Vec<Due>>> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let Ok(text) = String::from_utf8(bytes) else {
        return Ok(None);
    };
    let lines = || {
        (1..)
            .zip(text.lines())
            .filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'))
    };
    let seconds = |line: &str| line.split(',').next().unwrap_or("").trim().parse::<f64>();
    let first = lines().next();
    if first.is_none_or(|(_, line)| seconds(line).is_err()) {
        return Ok(None);
    }
    let mut dues = Vec::new();
    for (number, line) in lines() {
        let place = || format!("{}, line {number}", path.display());
        let at = seconds(line)
            .ok()
            .and_then(|at| Duration::try_from_secs_f64(at).ok())
            .with_context(|| format!("{}: a time in seconds comes first", place()))?;
        let model = match line.split_once(',') {
            None => None,
            Some((_, name)) => {
                let name = name.trim();
                let found = names.iter().position(|candidate| *candidate == name);
                Some(found.with_context(|| {
                    format!("{}: model '{name}' is none of the scenario's", place())
                })?)
            }
        };
        dues.push(Due { at, model });
    }
    Ok(Some(dues))
}

/// Calls of functions, each of which calls one of the models.
fn counted_calls(
    mut trace: Trace,
    source: &TraceSource,
    models: usize,
    dice: &mut Dice,
) -> Vec<Due> {
    if let Some(at_most) = source.at_most {
        for count in trace.functions.iter_mut().flatten() {
            *count = (*count).min(at_most);
        }
    }
    let calls = trace.calls(Within::Spread, dice.next());
    calls
        .into_iter()
        .map(|call| Due {
            at: Duration::from_nanos(call.at.as_nanos()),
            model: Some(call.function as usize % models.max(1)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(arrivals: Arrivals) -> Open {
        Open {
            arrivals,
            ..Open::default()
        }
    }

    fn first(open: &Open, rate: f64, count: usize) -> Vec<f64> {
        let schedule = Schedule::new(open, rate, &["a", "b"], Dice::new(1, 0)).unwrap();
        schedule
            .take(count)
            .map(|due| due.at.as_secs_f64())
            .collect()
    }

    #[test]
    fn constant_arrivals_do_not_drift() {
        let times = first(&open(Arrivals::Constant), 3.0, 3001);
        assert_eq!(times[0], 0.0);
        assert!((times[3000] - 1000.0).abs() < 1e-6, "{}", times[3000]);
    }

    #[test]
    fn poisson_arrivals_keep_their_rate_and_their_variance() {
        let times = first(&open(Arrivals::Poisson), 100.0, 20_001);
        let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        assert!((mean - 0.01).abs() < 0.0003, "{mean}");
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.05, "{variance}");
    }

    #[test]
    fn bursts_come_whole_and_others_in_between() {
        let mut open = open(Arrivals::Bursts);
        open.bursts = Some(Bursts {
            size: 3,
            every: Duration::from_secs(2),
        });
        assert_eq!(first(&open, 0.0, 7), [0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 4.0]);
        let mixed = first(&open, 5.0, 500);
        assert!(mixed.is_sorted());
        let at_two = mixed.iter().filter(|&&at| at == 2.0).count();
        assert_eq!(at_two, 3);
        assert!(mixed.iter().any(|&at| at > 0.0 && at < 2.0));
    }

    #[test]
    fn trace_files_name_times_and_models() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("calls.csv");
        std::fs::write(&file, "# seconds,model\n5,b\n2\n\n12,a\n").unwrap();
        let mut source = TraceSource {
            file: Some(file.clone()),
            speed: 10.0,
            start: Duration::from_secs(3),
            at_most: None,
        };
        let read = |source: &TraceSource| trace(source, &["a", "b"], Dice::new(1, 0));
        let due = |millis, model| Due {
            at: Duration::from_millis(millis),
            model,
        };
        let dues = read(&source).unwrap();
        assert_eq!(dues, [due(200, Some(1)), due(900, Some(0))]);
        std::fs::write(&file, "1,a\n2,c\n").unwrap();
        let error = read(&source).unwrap_err().to_string();
        assert!(error.contains("line 2: model 'c'"), "{error}");
        std::fs::write(&file, "o,a,f,t,1,2\nx,y,z,http,2,3\nx,y,w,http,0,9\n").unwrap();
        source.start = Duration::from_secs(60);
        source.at_most = Some(4);
        let dues = read(&source).unwrap();
        assert_eq!(dues.len(), 3 + 4);
        assert!(dues.iter().all(|due| due.at <= Duration::from_secs(6)));
        let second = dues.iter().filter(|due| due.model == Some(1)).count();
        assert_eq!(second, 4);
    }
}
