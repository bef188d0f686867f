use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::heap::Trims;
use super::*;

/// A root folder with these files.
fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

const HOST: (&str, &str) = (
    "proc/meminfo",
    "MemTotal:       16000 kB\nMemFree:  9 kB\nMemAvailable:   4000 kB\n",
);

fn limit(files: &[(&str, &str)]) -> Option<(u64, String)> {
    let root = root(files);
    let found = MemoryLimit::detect_in(root.path())?;
    let source = match found.source {
        LimitSource::ControlGroup(file) => {
            let inside = file.strip_prefix(root.path()).unwrap();
            inside.display().to_string()
        }
        LimitSource::Host => "host".to_owned(),
    };
    Some((found.bytes, source))
}

fn is(bytes: u64, source: &str) -> Option<(u64, String)> {
    Some((bytes, source.to_owned()))
}

#[test]
fn the_machine_is_the_limit_where_no_group_has_one() {
    assert_eq!(limit(&[HOST]), is(16000 << 10, "host"));
    let unlimited = [
        HOST,
        ("proc/self/cgroup", "0::/pod\n"),
        ("sys/fs/cgroup/pod/memory.max", "max\n"),
        ("sys/fs/cgroup/pod/memory.high", "max\n"),
    ];
    assert_eq!(limit(&unlimited), is(16000 << 10, "host"));
    assert_eq!(limit(&[]), None);
}

#[test]
fn the_least_limit_on_the_way_up_counts() {
    let files = [
        HOST,
        ("proc/self/cgroup", "0::/kube/pod/box\n"),
        ("sys/fs/cgroup/kube/memory.max", "9000000\n"),
        ("sys/fs/cgroup/kube/pod/memory.max", "5000000\n"),
        ("sys/fs/cgroup/kube/pod/memory.high", "4000000\n"),
        ("sys/fs/cgroup/kube/pod/box/memory.max", "max\n"),
        ("sys/fs/cgroup/kube/pod/box/memory.high", "max\n"),
    ];
    let high = "sys/fs/cgroup/kube/pod/memory.high";
    assert_eq!(limit(&files), is(4_000_000, high));
}

#[test]
fn a_group_outside_the_namespace_is_read_at_the_top() {
    for path in ["/", "/../../elsewhere", "/not/mounted/here"] {
        let membership = format!("0::{path}\n");
        let files = [
            HOST,
            ("proc/self/cgroup", membership.as_str()),
            ("sys/fs/cgroup/memory.max", "7000000\n"),
        ];
        let top = "sys/fs/cgroup/memory.max";
        assert_eq!(limit(&files), is(7_000_000, top), "{path}");
    }
}

#[test]
fn the_older_hierarchy_is_understood() {
    let membership = "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n";
    let unlimited = "9223372036854771712\n";
    let files = [
        HOST,
        ("proc/self/cgroup", membership),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", unlimited),
        ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "3000000\n"),
        ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", unlimited),
    ];
    let a = "sys/fs/cgroup/memory/a/memory.limit_in_bytes";
    assert_eq!(limit(&files), is(3_000_000, a));
}

#[test]
fn nonsense_is_no_limit() {
    let files = [
        HOST,
        ("proc/self/cgroup", "nonsense\n0::/pod\n:::\n"),
        ("sys/fs/cgroup/pod/memory.max", "-5\n"),
        ("sys/fs/cgroup/pod/memory.high", "99999999999999999999999\n"),
    ];
    assert_eq!(limit(&files), is(16000 << 10, "host"));
    let broken = [("proc/meminfo", "MemTotal: 18446744073709551615 kB\n")];
    assert_eq!(limit(&broken), None);
}

#[test]
fn the_default_budget_leaves_a_fifth() {
    let limit = MemoryLimit {
        bytes: u64::MAX,
        source: LimitSource::Host,
    };
    assert!(limit.default_budget() < u64::MAX / 5 * 4 + 10);
    let limit = MemoryLimit {
        bytes: 1000,
        source: LimitSource::Host,
    };
    assert_eq!(limit.default_budget(), 800);
}

#[test]
fn pressure_is_that_of_the_group_with_the_limit() {
    let root = root(&[
        HOST,
        ("proc/self/cgroup", "0::/pod/box\n"),
        (
            "proc/pressure/memory",
            "some avg10=90.00 avg60=0.00 total=1\n",
        ),
        ("sys/fs/cgroup/pod/memory.max", "2000000\n"),
        ("sys/fs/cgroup/pod/memory.current", "1500000\n"),
        (
            "sys/fs/cgroup/pod/memory.stat",
            "anon 5\ninactive_file 400000\nactive_file 200000\nslab_reclaimable 50000\n",
        ),
        (
            "sys/fs/cgroup/pod/memory.pressure",
            "some avg10=2.50 avg60=0.10 avg300=0.00 total=99\nfull avg10=1.00 avg60=0.00 total=1\n",
        ),
        ("sys/fs/cgroup/pod/box/memory.max", "max\n"),
        ("sys/fs/cgroup/pod/box/memory.current", "1\n"),
    ]);
    let sample = PressureGauge::in_root(root.path()).sample();
    let expected = Pressure {
        limit_bytes: Some(2_000_000),
        used_bytes: Some(1_100_000),
        wall: Some(Wall {
            limit_bytes: 2_000_000,
            kept_bytes: 850_000,
        }),
        available_bytes: Some(4000 << 10),
        stalled: Some(0.025),
    };
    assert_eq!(sample, expected);
    assert_eq!(sample.headroom_bytes(), Some(900_000));
    assert!(!sample.is_high());
}

#[test]
fn without_a_group_the_machine_is_read() {
    let root = root(&[
        HOST,
        (
            "proc/pressure/memory",
            "some avg10=12.00 avg60=0.00 total=1\n",
        ),
    ]);
    let sample = PressureGauge::in_root(root.path()).sample();
    assert_eq!(sample.used_bytes, Some(12000 << 10));
    assert_eq!(sample.headroom_bytes(), Some(4000 << 10));
    assert_eq!(sample.stalled, Some(0.12));
    let nothing = PressureGauge::in_root(Path::new("/nowhere/at/all")).sample();
    assert_eq!(nothing, Pressure::default());
    assert!(!nothing.is_high());
}

#[test]
fn waiting_is_high_pressure_only_where_little_is_left() {
    let mut pressure = Pressure {
        limit_bytes: Some(1600),
        used_bytes: Some(1200),
        wall: None,
        available_bytes: None,
        stalled: Some(0.12),
    };
    assert!(!pressure.is_high());
    pressure.used_bytes = Some(1201);
    assert!(pressure.is_high());
    pressure.stalled = Some(0.1);
    assert!(!pressure.is_high());
    let unknown = Pressure {
        stalled: Some(0.12),
        ..Pressure::default()
    };
    assert!(unknown.is_high());
}

#[test]
fn little_headroom_is_high_pressure() {
    let mut pressure = Pressure {
        limit_bytes: Some(1600),
        used_bytes: Some(1500),
        wall: None,
        available_bytes: None,
        stalled: None,
    };
    assert!(!pressure.is_high());
    pressure.used_bytes = Some(1501);
    assert!(pressure.is_high());
}

/// Memory as a container with a limit of 2000 kB sees it, with other files in addition.
fn in_container(current: &str, stat: &str, others: &[(&str, &str)]) -> Pressure {
    let mut files = vec![
        ("proc/self/cgroup", "0::/pod\n"),
        ("sys/fs/cgroup/pod/memory.max", "2048000\n"),
        ("sys/fs/cgroup/pod/memory.current", current),
        ("sys/fs/cgroup/pod/memory.stat", stat),
    ];
    files.extend(others);
    let root = root(&files);
    PressureGauge::in_root(root.path()).sample()
}

#[test]
fn a_container_is_almost_full_when_a_twentieth_is_left() {
    let stat = "anon 1900000\ninactive_file 1000\nactive_file 500\nslab_reclaimable 100\n";
    assert!(!in_container("1947200\n", stat, &[HOST]).is_critical());
    assert!(in_container("1947201\n", stat, &[HOST]).is_critical());
    // A limit on the machine is not one that kills in this process.
    let alone = root(&[(
        "proc/meminfo",
        "MemTotal: 16000 kB\nMemFree: 9 kB\nMemAvailable: 1 kB\n",
    )]);
    let alone = PressureGauge::in_root(alone.path()).sample();
    assert!(alone.is_high() && !alone.is_critical());
}

#[test]
fn a_container_is_not_full_because_its_neighbours_are() {
    let starved = (
        "proc/meminfo",
        "MemTotal: 16000 kB\nMemFree: 9 kB\nMemAvailable: 50 kB\n",
    );
    let pressure = in_container("100000\n", "anon 100000\n", &[starved]);
    assert!(pressure.is_high(), "{pressure:?}");
    assert!(!pressure.is_critical(), "{pressure:?}");
}

#[test]
fn where_the_kernel_only_stalls_nothing_is_refused() {
    let high = [HOST, ("sys/fs/cgroup/pod/memory.high", "1024000\n")];
    let pressure = in_container("1023000\n", "anon 1000000\n", &high);
    assert!(pressure.is_high(), "{pressure:?}");
    assert!(!pressure.is_critical(), "{pressure:?}");
    // The limit that kills may be that of a group around.
    let around = [
        ("proc/self/cgroup", "0::/pod/box\n"),
        ("sys/fs/cgroup/pod/box/memory.max", "max\n"),
        ("sys/fs/cgroup/pod/box/memory.high", "1024000\n"),
        ("sys/fs/cgroup/pod/box/memory.current", "2000\n"),
    ];
    assert!(in_container("2040000\n", "anon 1\n", &around).is_critical());
}

#[test]
fn page_cache_in_use_does_not_fill_a_container() {
    let stat = "anon 300000\ninactive_file 1000\nactive_file 1500000\nslab_reclaimable 200000\n";
    let pressure = in_container("2040000\n", stat, &[HOST]);
    assert!(!pressure.is_critical(), "{pressure:?}");
    let one = root(&[
        HOST,
        ("proc/self/cgroup", "4:memory:/a\n"),
        ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "2048000\n"),
        ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "2040000\n"),
        (
            "sys/fs/cgroup/memory/a/memory.stat",
            "active_file 1\ntotal_inactive_file 5\ntotal_active_file 1500000\n",
        ),
    ]);
    let pressure = PressureGauge::in_root(one.path()).sample();
    assert!(!pressure.is_critical(), "{pressure:?}");
}

#[test]
fn requests_may_hold_a_quarter_of_the_memory() {
    let limit = |mib: u64| MemoryLimit {
        bytes: mib << 20,
        source: LimitSource::Host,
    };
    assert_eq!(limit(16 << 10).most_in_flight(), 4 << 30);
    assert_eq!(limit(1024).most_in_flight(), 256 << 20);
    assert_eq!(limit(256).most_in_flight(), 128 << 20);
}

#[test]
#[cfg(target_os = "linux")]
fn resident_set_is_told_in_bytes() {
    let resident = resident_bytes().unwrap();
    assert!(resident > 64 * 1024, "{resident}");
    assert!(resident < 1 << 40, "{resident}");
    assert!(MemoryLimit::detect().unwrap().bytes > resident);
    let anonymous = anonymous_bytes().unwrap();
    assert!(anonymous > 0 && anonymous < 1 << 40, "{anonymous}");
}

#[test]
fn footprint_is_read_from_the_rollup() {
    let rollup = "55d0-7ffd ---p 00000000 00:00 0  [rollup]\nRss:   900 kB\nPss:   700 kB\n\
                  Pss_Anon: 5 kB\nPrivate_Clean: 100 kB\nPrivate_Dirty:   300 kB\nAnonymous:  250 kB\n";
    let expected = Footprint {
        resident_bytes: 900 << 10,
        pss_bytes: 700 << 10,
        private_bytes: 400 << 10,
        anonymous_bytes: 250 << 10,
    };
    assert_eq!(Footprint::parse(rollup), Some(expected));
    assert_eq!(Footprint::parse("Rss: many\n"), None);
}

#[test]
fn releasing_memory_leaves_live_data_alone() {
    let kept = vec![7u8; 1 << 20];
    drop(vec![1u8; 1 << 20]);
    release_memory();
    assert!(kept.iter().all(|&byte| byte == 7));
}

#[test]
fn many_releases_at_once_share_a_trim() {
    const CALLERS: usize = 16;
    let trims = Trims::new();
    let runs = AtomicUsize::new(0);
    let waiting = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            trims.run(|| {
                // Everybody else calls while this one runs.
                while waiting.load(Ordering::Acquire) < CALLERS {
                    std::thread::yield_now();
                }
                runs.fetch_add(1, Ordering::Relaxed);
            });
        });
        while !trims.is_running() {
            std::thread::yield_now();
        }
        for _ in 0..CALLERS {
            scope.spawn(|| {
                waiting.fetch_add(1, Ordering::Release);
                trims.run(|| {
                    runs.fetch_add(1, Ordering::Relaxed);
                });
            });
        }
        first.join().unwrap();
    });
    // One for the first, and as few as the scheduler lets for the others: those that had called
    // before the first ended share one.
    let runs = runs.into_inner();
    assert!((2..=1 + CALLERS).contains(&runs), "{runs}");
}

#[test]
fn a_trim_that_panics_leaves_the_next_caller_free() {
    let trims = Trims::new();
    let fault = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        trims.run(|| panic!("in the trim"));
    }));
    assert!(fault.is_err());
    let mut ran = false;
    trims.run(|| ran = true);
    assert!(ran);
}
