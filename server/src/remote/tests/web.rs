use super::*;

const MODEL: &str = "m/1/model.onnx";

/// Sends what is there.
fn plainly(site: &Site, request: &Request) -> Response {
    let files = site.files.lock();
    match files.get(request.uri().path().trim_start_matches("/repo/")) {
        Some(bytes) => send(bytes, request, "\"one\""),
        None => refuse(404),
    }
}

impl Fixture {
    /// Indexes what was put, as the command does it.
    fn index(&self) -> &Self {
        let folder = tempfile::tempdir().unwrap();
        for (path, bytes) in &*self.site.files.lock() {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
        index_file::write(folder.path()).unwrap();
        self.put(
            "index.json",
            std::fs::read(folder.path().join("index.json")).unwrap(),
        )
    }

    fn web(&self, remotes: &Remotes) -> Arc<RemoteRepository> {
        let address = format!("http://{}/repo", self.address);
        let repository = self.open(&address, remotes);
        repository.refresh().unwrap();
        repository
    }
}

#[test]
fn a_file_is_fetched_in_parts_once_and_then_found_in_the_cache() {
    let fixture = Fixture::new(plainly);
    let bytes = noise(300 << 10);
    fixture
        .put(MODEL, bytes.clone())
        .put("m/config.pbtxt", "")
        .index();
    let remotes = fixture.remotes(|_| {});
    let repository = fixture.web(&remotes);
    let file = file_of(&repository, MODEL);
    assert!(!repository.has_all([&file].into_iter()));
    let copy = repository.open(&file).unwrap();
    assert!(content(&copy) == bytes);
    assert_eq!(fixture.asked("model.onnx bytes="), 5);
    assert!(content(&repository.open(&file).unwrap()) == bytes);
    let empty = repository.open(&file_of(&repository, "m/config.pbtxt"));
    assert!(content(&empty.unwrap()).is_empty());
    // Another process finds both, without a word to the server.
    let asked = fixture.site.asked.lock().len();
    let remotes = fixture.remotes(|_| {});
    let repository = fixture.open(&format!("http://{}/repo", fixture.address), &remotes);
    assert!(content(&repository.open(&file_of(&repository, MODEL)).unwrap()) == bytes);
    assert_eq!(fixture.site.asked.lock().len(), asked);
    let metrics = fixture.metrics.render();
    assert!(
        metrics.contains("dormouse_repository_fetched_bytes_total 307200"),
        "{metrics}"
    );
    assert!(
        metrics.contains("dormouse_repository_cache_hits_total 2"),
        "{metrics}"
    );
}

/// Sends nothing less than whole files.
fn wholly(site: &Site, request: &Request) -> Response {
    let path = request.uri().path().trim_start_matches("/repo/");
    match site.files.lock().get(path) {
        Some(bytes) => Response::new(bytes.clone().into()),
        None => refuse(404),
    }
}

#[test]
fn a_server_without_ranges_is_read_from_front_to_back() {
    let fixture = Fixture::new(wholly);
    let bytes = noise(200 << 10);
    fixture.put(MODEL, bytes.clone()).index();
    let remotes = fixture.remotes(|_| {});
    // However much longer it is than any part.
    let location = format!("http://{}/repo", fixture.address);
    let location = Location::parse(&location).unwrap();
    let transport = Transport::new(TransportOptions {
        patience: Duration::from_secs(5),
        tls: Arc::clone(&remotes.tls),
        addresses: Addresses::Any,
        allowed: Some(vec![location.clone()]),
        tags_are_md5: false,
        max_body: 100 << 10,
    });
    let bucket = Bucket::web(transport, &location.to_string(), None);
    let repository = remotes.with_bucket(location, bucket);
    repository.refresh().unwrap();
    let copy = repository.open(&file_of(&repository, MODEL)).unwrap();
    assert!(content(&copy) == bytes);
}

#[test]
fn a_server_that_stops_sending_parts_is_told_of() {
    let fixture = Fixture::new(|site, request| {
        let range = request.headers().get("range");
        match range.is_some_and(|range| range != "bytes=0-65535") {
            true => wholly(site, request),
            false => plainly(site, request),
        }
    });
    fixture.put(MODEL, noise(200 << 10)).index();
    let remotes = fixture.remotes(|_| {});
    let repository = fixture.web(&remotes);
    let error = repository.open(&file_of(&repository, MODEL)).unwrap_err();
    assert!(error.to_string().contains("then no more"), "{error}");
}

#[test]
fn a_whole_file_that_only_trickles_is_given_up() {
    let fixture = Fixture::new(|site, request| {
        if !request.uri().path().ends_with(".onnx") {
            return plainly(site, request);
        }
        // Never silent for long, and never done.
        let trickle = futures_util::stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            Some((
                Ok::<_, std::convert::Infallible>(bytes::Bytes::from_static(b"x")),
                (),
            ))
        });
        Response::new(axum::body::Body::from_stream(trickle))
    });
    fixture.put(MODEL, noise(100 << 10)).index();
    // Long enough for the first part to be asked for, by which it is known that none are sent.
    let remotes = fixture.remotes(|config| {
        config.retries = 0;
        config.deadline = Duration::from_secs(3);
    });
    let repository = fixture.web(&remotes);
    let error = repository.open(&file_of(&repository, MODEL)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("the file did not come within 6s"),
        "{error}"
    );
}

#[test]
fn a_disguised_path_is_not_followed() {
    let fixture = Fixture::new(|site, request| match request.uri().path() {
        "/repo/m/1/model.onnx" => Response::builder()
            .status(302)
            .header("location", "/repo/%2E%2e/secret")
            .body(axum::body::Body::empty())
            .unwrap(),
        _ => plainly(site, request),
    });
    fixture.put(MODEL, "abc").index();
    let remotes = fixture.remotes(|_| {});
    let repository = fixture.web(&remotes);
    let error = repository.open(&file_of(&repository, MODEL)).unwrap_err();
    assert!(error.to_string().contains("disguised"), "{error}");
    assert_eq!(fixture.asked("secret"), 0);
}

#[test]
fn parts_that_fail_are_asked_for_again_and_what_came_is_kept() {
    let failures = std::sync::atomic::AtomicUsize::new(0);
    let fixture = Fixture::new(move |site, request| {
        let range = request
            .headers()
            .get("range")
            .and_then(|range| range.to_str().ok());
        // The third part does not come, three times; then it does.
        if range == Some("bytes=131072-196607")
            && failures.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 4
        {
            return refuse(503);
        }
        plainly(site, request)
    });
    let bytes = noise(300 << 10);
    fixture.put(MODEL, bytes.clone()).index();
    // One after the other, so that two are there when the third fails.
    let remotes = fixture.remotes(|config| config.concurrency = 1);
    let repository = fixture.web(&remotes);
    let file = file_of(&repository, MODEL);
    let error = repository.open(&file).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("503 Service Unavailable (Because)"),
        "{error}"
    );
    assert!(content(&repository.open(&file).unwrap()) == bytes);
    assert_eq!(
        fixture.asked("bytes=0-"),
        1,
        "the first part was fetched twice"
    );
    assert_eq!(fixture.asked("bytes=131072-"), 5);
    let metrics = fixture.metrics.render();
    assert!(
        metrics.contains(r#"errors_total{kind="busy"} 4"#),
        "{metrics}"
    );
}

#[test]
fn what_has_another_digest_than_listed_is_not_used() {
    let fixture = Fixture::new(plainly);
    fixture.put(MODEL, noise(100 << 10)).index();
    let remotes = fixture.remotes(|_| {});
    let repository = fixture.web(&remotes);
    let file = file_of(&repository, MODEL);
    fixture.put(MODEL, vec![7; 100 << 10]);
    let error = repository.open(&file).unwrap_err();
    assert!(error.to_string().contains("digest"), "{error}");
    // Once the index tells of it, it is another file.
    fixture.index();
    assert!(repository.open(&file).is_err());
    let now = file_of(&repository, MODEL);
    assert_ne!(now, file);
    assert!(content(&repository.open(&now).unwrap()) == vec![7; 100 << 10]);
}

#[test]
fn a_redirect_is_followed_only_to_where_it_is_allowed() {
    let fixture = Fixture::new(|site, request| match request.uri().path() {
        "/repo/m/1/model.onnx" => Response::builder()
            .status(302)
            .header("location", "/elsewhere/model")
            .body(axum::body::Body::empty())
            .unwrap(),
        "/elsewhere/model" => send(b"abc", request, "\"x\""),
        _ => plainly(site, request),
    });
    fixture.put(MODEL, "abc").index();
    let remotes = fixture.remotes(|_| {});
    let repository = fixture.web(&remotes);
    let error = repository.open(&file_of(&repository, MODEL)).unwrap_err();
    assert!(error.to_string().contains("--allow-repository"), "{error}");
    assert_eq!(fixture.asked("/elsewhere"), 0);
    let allowed = Location::parse(&format!("http://{}", fixture.address)).unwrap();
    let remotes = fixture.remotes(|config| config.allow = vec![allowed]);
    let repository = fixture.web(&remotes);
    let copy = repository.open(&file_of(&repository, MODEL)).unwrap();
    assert_eq!(content(&copy), b"abc");
}

#[test]
fn metadata_addresses_are_refused_and_silence_ends() {
    let fixture = Fixture::new(plainly);
    let remotes = fixture.remotes(|config| config.retries = 0);
    let repository = fixture.open("https://169.254.169.254/latest", &remotes);
    let error = repository.refresh().unwrap_err();
    assert_eq!(error.kind, ErrorKind::Refused, "{error}");
    // Somebody listens but never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let remotes = fixture.remotes(|config| {
        config.retries = 0;
        config.patience = Duration::from_millis(100);
    });
    let address = format!("http://{}/x", silent.local_addr().unwrap());
    let error = fixture.open(&address, &remotes).refresh().unwrap_err();
    assert_eq!(error.kind, ErrorKind::Interrupted, "{error}");
    // The port that nobody is ever given.
    let remotes = fixture.remotes(|config| config.retries = 0);
    let nobody = fixture.open("http://127.0.0.1:1/x", &remotes);
    let error = nobody.refresh().unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
}

#[test]
fn a_repository_out_of_reach_is_known_from_before() {
    let fixture = Fixture::new(plainly);
    fixture
        .put(MODEL, "abc")
        .put("other/1/model.onnx", "abcd")
        .index();
    let remotes = fixture.remotes(|config| config.retries = 0);
    let repository = fixture.web(&remotes);
    repository.open(&file_of(&repository, MODEL)).unwrap();
    fixture.site.files.lock().clear();
    let again = fixture.open(&repository.location().to_string(), &remotes);
    let error = again.refresh().unwrap_err();
    assert!(
        error.to_string().contains("dormouse repository index"),
        "{error}"
    );
    assert_eq!(again.trouble(), Some(error));
    assert_eq!(
        content(&again.open(&file_of(&again, MODEL)).unwrap()),
        b"abc"
    );
    let error = again
        .open(&file_of(&again, "other/1/model.onnx"))
        .unwrap_err();
    assert!(error.to_string().contains("404"), "{error}");
}

#[test]
fn the_longest_unused_copies_leave_when_there_is_no_room() {
    let fixture = Fixture::new(plainly);
    for name in ["a", "b", "c"] {
        fixture.put(&format!("{name}/1/model.onnx"), noise(100 << 10));
    }
    fixture
        .index()
        .put("huge/1/model.onnx", noise(300 << 10))
        .index();
    let remotes = fixture.remotes(|config| config.cache_size = ByteSize(250 << 10));
    let repository = fixture.web(&remotes);
    let file = |name: &str| file_of(&repository, &format!("{name}/1/model.onnx"));
    let has = |name: &str| repository.has_all([&file(name)].into_iter());
    drop(repository.open(&file("a")).unwrap());
    let held = repository.open(&file("b")).unwrap();
    age(fixture.cache.path());
    drop(repository.open(&file("a")).unwrap());
    // B is older, but somebody reads it.
    drop(repository.open(&file("c")).unwrap());
    assert_eq!((has("a"), has("b"), has("c")), (false, true, true));
    drop(held);
    drop(repository.open(&file("a")).unwrap());
    assert_eq!((has("a"), has("b"), has("c")), (true, false, true));
    let error = repository.open(&file("huge")).unwrap_err();
    assert!(
        error.to_string().contains("--repository-cache-size"),
        "{error}"
    );
}

/// Makes every copy one that was last used long ago.
fn age(cache: &Path) {
    for entry in std::fs::read_dir(cache.join("objects")).unwrap() {
        let file = std::fs::File::options()
            .write(true)
            .open(entry.unwrap().path());
        let (file, hour) = (file.unwrap(), Duration::from_secs(3600));
        // The copies' own times are how they are known.
        if file.metadata().unwrap().len() < 10 << 10 {
            file.set_modified(std::time::SystemTime::now() - hour)
                .unwrap();
        }
    }
}

#[test]
fn a_copy_that_was_changed_or_cut_is_fetched_again() {
    let fixture = Fixture::new(plainly);
    let bytes = noise(100 << 10);
    fixture.put(MODEL, bytes.clone()).index();
    let remotes = fixture.remotes(|_| {});
    let repository = fixture.web(&remotes);
    let file = file_of(&repository, MODEL);
    drop(repository.open(&file).unwrap());
    let objects = || std::fs::read_dir(fixture.cache.path().join("objects")).unwrap();
    let copy = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.unwrap().path();
        path.extension().is_none().then_some(path)
    };
    for damage in [&b"short"[..], &vec![0; 100 << 10]] {
        let path = objects().find_map(copy).unwrap();
        std::fs::write(&path, damage).unwrap();
        assert!(content(&repository.open(&file).unwrap()) == bytes);
    }
    // A link in its place leads nowhere.
    let path = objects().find_map(copy).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    assert!(content(&repository.open(&file).unwrap()) == bytes);
    assert!(!objects().find_map(copy).unwrap().is_symlink());
}

#[test]
fn many_who_want_the_same_file_fetch_it_once() {
    let fixture = Fixture::new(plainly);
    fixture.put(MODEL, noise(300 << 10)).index();
    let remotes = fixture.remotes(|_| {});
    let repository = fixture.web(&remotes);
    let file = file_of(&repository, MODEL);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| repository.open(&file).unwrap());
        }
    });
    assert_eq!(fixture.asked("bytes=0-"), 1);
}
