//! Whether a request can be answered in time, decided when it arrives.
//!
//! A request that will miss its deadline costs its client the wait and others the run; refused at
//! once it costs nothing, and the server goes on serving what it can.

use std::time::Duration;

use crate::profile::{CAUTION, ServiceProfile, seconds};
use crate::time::Timestamp;

/// The work ahead of a new request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outlook {
    /// Rows that wait.
    pub queued_rows: u64,
    /// Runs under way.
    pub running: usize,
    /// Runs that may be under way at once.
    pub concurrency: usize,
    /// Rows of the largest batch.
    pub max_rows: u32,
    /// When the oldest run under way started.
    pub running_since: Option<Timestamp>,
    /// How much longer the model loads, if it is not warm.
    pub load_remaining: Option<Duration>,
}

/// The refusal of a request that would miss its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the deadline cannot be met: the request would wait about {} ms", expected_wait.as_millis())]
pub struct CannotMeetDeadline {
    /// How long the request would wait before it runs.
    pub expected_wait: Duration,
    /// When an equal request has a chance, if no others come.
    pub retry_after: Duration,
}

/// Admits a request unless it is expected to miss its deadline.
///
/// # Why an idle model admits everything
///
/// Estimates are corrected by runs, and there are runs only if something is admitted. So a
/// request with nothing ahead of it is tried whatever the estimate says, and so is the one that
/// wakes a cold model: a bad estimate costs one request, never the model.
pub fn admit(
    outlook: &Outlook,
    profile: &ServiceProfile,
    rows: u32,
    deadline: Option<Timestamp>,
    now: Timestamp,
) -> Result<(), CannotMeetDeadline> {
    let Some(deadline) = deadline else {
        return Ok(());
    };
    if deadline <= now {
        return Err(CannotMeetDeadline {
            expected_wait: Duration::ZERO,
            retry_after: Duration::ZERO,
        });
    }
    let concurrency = outlook.concurrency.max(1);
    if outlook.queued_rows == 0 && outlook.running < concurrency {
        return Ok(());
    }
    let Some(forecast) = forecast(outlook, profile, rows, now) else {
        return Ok(());
    };
    let needed = forecast.wait.saturating_add(forecast.cautious_run);
    let left = deadline - now;
    if needed <= left {
        return Ok(());
    }
    Err(CannotMeetDeadline {
        expected_wait: forecast.wait,
        retry_after: needed - left,
    })
}

struct Forecast {
    wait: Duration,
    cautious_run: Duration,
}

/// When the request would start and how long, at worst, its answer takes from there.
fn forecast(
    outlook: &Outlook,
    profile: &ServiceProfile,
    rows: u32,
    now: Timestamp,
) -> Option<Forecast> {
    let max_rows = u64::from(outlook.max_rows.max(1));
    let concurrency = outlook.concurrency.max(1);
    let behind = outlook.queued_rows.saturating_add(u64::from(rows));
    // Batches that leave before the one with this request's last row.
    let ahead = behind.div_ceil(max_rows).saturating_sub(1);
    let own_rows = if ahead == 0 { behind } else { max_rows };
    let own = profile.estimate(clamp_rows(own_rows))?;
    let full = profile.estimate(clamp_rows(max_rows.min(outlook.queued_rows.max(1))))?;

    let free = concurrency.saturating_sub(outlook.running) as u64;
    let (residual, rounds) = match ahead.checked_sub(free) {
        // All slots are taken when its turn comes: it needs one completion, and one per batch.
        Some(waiting) => {
            let residual = if outlook.running > 0 {
                residual(outlook, profile, now)
            } else {
                full.mean
            };
            (residual, waiting as f64)
        }
        None => (0.0, 0.0),
    };
    let load = outlook.load_remaining.unwrap_or_default().as_secs_f64();
    let wait = load + residual + rounds * full.mean / concurrency as f64;
    // Independent deviations add up as their squares: the rounds before, the run under way, its own.
    let under_way = if residual > 0.0 { 1.0 } else { 0.0 };
    let before = (rounds / concurrency as f64 + under_way) * full.deviation.powi(2);
    let spread = (before + own.deviation.powi(2)).sqrt();
    let drift = profile.drift() * (wait - load);
    Some(Forecast {
        wait: seconds(wait),
        cautious_run: seconds(own.mean + CAUTION * spread + drift),
    })
}

/// What is left of the oldest run, in seconds.
fn residual(outlook: &Outlook, profile: &ServiceProfile, now: Timestamp) -> f64 {
    let typical = profile.typical_run().unwrap_or_default().as_secs_f64();
    match outlook.running_since {
        Some(since) => {
            // The longer a run is overdue, the longer it will probably still take.
            let elapsed = (now - since).as_secs_f64();
            (typical - elapsed).abs()
        }
        None => typical,
    }
}

fn clamp_rows(rows: u64) -> u32 {
    u32::try_from(rows).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
