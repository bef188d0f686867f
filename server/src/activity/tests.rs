use super::*;

const T: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn a_server_nobody_called_is_idle_from_its_start() {
    let activity = Activity::new(Clock::start());
    assert_eq!(activity.idle_for(T).await, T);
}

#[tokio::test(start_paused = true)]
async fn idle_time_counts_from_the_end_of_the_last_request() {
    let clock = Clock::start();
    let activity = Activity::new(clock);
    let request = {
        let activity = Arc::clone(&activity);
        async move {
            let _under_way = activity.begin(clock.now());
            tokio::time::sleep(T * 3 / 2).await;
        }
    };
    let (_, idle) = tokio::join!(request, activity.idle_for(T));
    assert!(idle >= T && idle < T + Duration::from_millis(5), "{idle:?}");
    assert!(clock.now() - Timestamp::ZERO >= T * 5 / 2);
}

#[tokio::test(start_paused = true)]
async fn a_hold_counts_as_activity_until_it_is_dropped() {
    let activity = Activity::new(Clock::start());
    let hold = activity.hold();
    tokio::time::sleep(T * 10).await;
    assert_eq!(activity.quiet_since(), None);
    drop(hold);
    let now = activity.clock.now();
    assert_eq!(activity.quiet_since(), Some(now));
}

#[tokio::test(start_paused = true)]
async fn requests_are_counted_in_flight_and_by_their_rate() {
    let activity = Activity::new(Clock::start());
    let model = Traffic::default();
    for _ in 0..12 {
        let now = activity.clock.now();
        let under_way = activity.begin(now).goes_to(&model, now);
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(activity.load(T).in_flight, 1);
        drop(under_way);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(activity.load(T).in_flight, 0);
    let now = activity.clock.now();
    let load = model.load(Duration::from_secs(12), now);
    assert_eq!(load.rate, 1.0);
    let ended = load.last.unwrap();
    assert!(now - ended >= Duration::from_millis(500), "{ended:?}");
    // A minute later none of them counts.
    tokio::time::sleep(LONGEST_WINDOW + SLICE).await;
    assert_eq!(model.load(LONGEST_WINDOW, activity.clock.now()).rate, 0.0);
}

#[tokio::test(start_paused = true)]
async fn a_load_is_active_until_its_idle_time_has_passed() {
    let load = Load {
        last: Some(Timestamp::ZERO + T),
        ..Load::default()
    };
    let at = |seconds| Timestamp::ZERO + T + Duration::from_secs(seconds);
    assert!(load.is_active(T, at(59)));
    assert!(!load.is_active(T, at(60)));
    let busy = Load {
        in_flight: 1,
        ..load
    };
    assert!(busy.is_active(T, at(1000)));
    assert!(!Load::default().is_active(T, at(0)));
}

#[tokio::test]
async fn who_waits_for_a_request_is_woken_by_it() {
    let activity = Activity::new(Clock::start());
    let model = Arc::new(Traffic::default());
    let waiting = tokio::spawn({
        let (activity, model) = (Arc::clone(&activity), Arc::clone(&model));
        async move {
            let is_busy = || model.load(T, activity.clock.now()).in_flight > 0;
            activity.until(is_busy).await;
        }
    });
    while activity.watchers.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    // Another model's request is not the one.
    let now = activity.clock.now();
    drop(activity.begin(now));
    tokio::task::yield_now().await;
    let _under_way = activity.begin(now).goes_to(&model, now);
    waiting.await.unwrap();
    assert_eq!(activity.watchers.load(Ordering::SeqCst), 0);
}
