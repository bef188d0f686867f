//! The host's memory and CPU, as Linux tells them.

/// The machine that the server runs on, at one moment.
pub(super) struct HostSample {
    pub(super) memory_total: u64,
    pub(super) memory_used: u64,
    /// Since the sample before.
    pub(super) utilization: f64,
}

impl HostSample {
    pub(super) fn read() -> Option<Self> {
        let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
        let field = |name: &str| -> Option<u64> {
            let line = meminfo.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace()
                .nth(1)?
                .parse::<u64>()
                .ok()?
                .checked_mul(1024)
        };
        let memory_total = field("MemTotal:")?;
        let memory_used = memory_total.saturating_sub(field("MemAvailable:")?);
        Some(Self {
            memory_total,
            memory_used,
            utilization: cpu_utilization()?,
        })
    }
}

/// Busy share of the host's CPU time since the last call.
fn cpu_utilization() -> Option<f64> {
    static LAST: parking_lot::Mutex<(u64, u64)> = parking_lot::Mutex::new((0, 0));
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    let ticks: Vec<u64> = stat
        .lines()
        .next()?
        .split_whitespace()
        .skip(1)
        .take(8)
        .filter_map(|tick| tick.parse().ok())
        .collect();
    let total: u64 = ticks.iter().sum();
    // Columns four and five are idle and waiting for IO.
    let busy = total.checked_sub(ticks.get(3)? + ticks.get(4)?)?;
    let mut last = LAST.lock();
    let (last_total, last_busy) = std::mem::replace(&mut *last, (total, busy));
    let passed = total.saturating_sub(last_total);
    Some(if passed == 0 {
        0.0
    } else {
        busy.saturating_sub(last_busy) as f64 / passed as f64
    })
}
