use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

#[tokio::test]
async fn a_job_returns_its_result_at_lower_priority() {
    let background = Background::new("test-job", 1);
    let niceness = || rustix::process::getpriority_process(None).unwrap();
    let before = niceness();
    let job =
        background.spawn(move || (std::thread::current().name().map(str::to_owned), niceness()));
    let (name, inside) = job.unwrap().await.unwrap();
    assert_eq!(name.as_deref(), Some("test-job"));
    assert_eq!(inside, (before + BACKGROUND_NICENESS).min(19));
    assert_eq!(niceness(), before, "the caller keeps its priority");
}

#[test]
fn no_more_jobs_run_at_once_than_were_allowed() {
    let background = Background::with_niceness("test-bound", 3, 0);
    let running = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let jobs: Vec<_> = (0..64)
        .map(|number| {
            let (running, most) = (Arc::clone(&running), Arc::clone(&most));
            let work = move || {
                let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                most.fetch_max(now, Ordering::SeqCst);
                std::thread::yield_now();
                running.fetch_sub(1, Ordering::SeqCst);
                number
            };
            background.spawn(work).unwrap()
        })
        .collect();
    let results: Vec<usize> = jobs.into_iter().map(|job| job.wait().unwrap()).collect();
    assert_eq!(results, (0..64).collect::<Vec<_>>());
    assert!((1..=3).contains(&most.load(Ordering::SeqCst)));
}

#[test]
fn a_job_that_panics_says_so_and_the_next_one_runs() {
    let background = Background::with_niceness("test-panic", 1, 0);
    let panicking = background.spawn(|| panic!("on purpose")).unwrap();
    let next = background.spawn(|| 7).unwrap();
    assert_eq!(panicking.wait(), Err::<(), _>(JobPanicked));
    assert_eq!(next.wait(), Ok(7));
}

#[test]
fn jobs_beyond_the_bound_are_refused() {
    let background = Background::with_niceness("test-full", 1, 0);
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let (began, begun) = std::sync::mpsc::channel();
    let first = background
        .spawn(move || {
            began.send(()).unwrap();
            gate.recv().is_ok()
        })
        .unwrap();
    begun.recv().unwrap();
    let waiting: Vec<_> = (0..MOST_WAITING)
        .map(|_| background.spawn(|| ()).unwrap())
        .collect();
    let refused = background.spawn(|| ()).unwrap_err();
    assert_eq!(refused.to_string(), "4096 test-full jobs wait already");
    open.send(()).unwrap();
    assert_eq!(first.wait(), Ok(true));
    for job in waiting {
        job.wait().unwrap();
    }
}
