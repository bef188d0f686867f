use std::io::Write;
use std::net::Ipv4Addr;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;

use super::*;

const HOME: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const AWAY: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 1, 2, 3));

const TOKENS: &str = r#"
[[token]]
name = "reader"
token = "reader-0123456789"
scopes = ["inference"]
quota = { bytes_in_flight = "10B", concurrency = 1 }

[[token]]
name = "ops"
token = "ops-0123456789abc"
scopes = ["management"]

[[certificate]]
subject = "keda"
scopes = ["metrics"]
"#;

/// The path is what is needed.
fn needs(_: &Method, path: &str) -> Need {
    match path {
        "/probe" => Need::Probe,
        "/metadata" => Need::Metadata,
        "/infer" => Need::Inference,
        "/stream" => Need::InferenceStream,
        "/region" => Need::SharedMemory,
        "/unload" => Need::Management,
        "/load" => Need::Load,
        "/metrics" => Need::Metrics,
        _ => Need::Unknown,
    }
}

fn guard(config: GuardConfig) -> Arc<Guard> {
    Guard::open(config, &Metrics::new().unwrap()).unwrap()
}

fn with_tokens() -> (Arc<Guard>, tempfile::NamedTempFile) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(TOKENS.as_bytes()).unwrap();
    let config = GuardConfig {
        tokens: Some(file.path().to_owned()),
        ..GuardConfig::default()
    };
    (guard(config), file)
}

fn request(path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::post(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Body::empty()).unwrap()
}

/// The status of a refusal, or 200.
fn asked(door: &Door, ip: IpAddr, path: &str, headers: &[(&str, &str)]) -> u16 {
    match door.visitor(ip, None).admit(&request(path, headers)) {
        Ok(_) => 200,
        Err(refusal) => refusal.into_http().status().as_u16(),
    }
}

#[test]
fn without_authentication_only_management_is_bound_to_this_machine() {
    let door = guard(GuardConfig::default()).door(Listener::Http, needs);
    for path in ["/probe", "/metadata", "/infer", "/metrics", "/nothing"] {
        assert_eq!(asked(&door, AWAY, path, &[]), 200, "{path}");
    }
    for path in ["/load", "/unload"] {
        assert_eq!(asked(&door, HOME, path, &[]), 200, "{path}");
        assert_eq!(asked(&door, AWAY, path, &[]), 403, "{path}");
        let mapped = Ipv4Addr::LOCALHOST.to_ipv6_mapped().into();
        assert_eq!(asked(&door, mapped, path, &[]), 200, "{path}");
        let evil = [("host", "127.0.0.1:1"), ("origin", "http://evil.example")];
        assert_eq!(asked(&door, HOME, path, &evil), 403, "{path}");
    }
    assert_eq!(asked(&door, AWAY, "/region", &[]), 200);
    let evil = [("host", "127.0.0.1:1"), ("origin", "http://evil.example")];
    assert_eq!(asked(&door, HOME, "/region", &evil), 403);
    assert_eq!(asked(&door, HOME, "/infer", &evil), 200);
    let config = GuardConfig {
        remote_management: true,
        ..GuardConfig::default()
    };
    let door = guard(config).door(Listener::Http, needs);
    assert_eq!(asked(&door, AWAY, "/load", &[]), 200);
}

#[test]
fn a_load_that_is_refused_for_something_else_is_not_counted_as_one() {
    let config = GuardConfig {
        quotas: QuotaLimits {
            concurrency: Some(1),
            loads_per_minute: Some(1),
            ..QuotaLimits::default()
        },
        ..GuardConfig::default()
    };
    let door = guard(config).door(Listener::Http, needs);
    let visitor = door.visitor(HOME, None);
    let under_way = visitor.admit(&request("/infer", &[])).unwrap();
    assert_eq!(asked(&door, HOME, "/load", &[]), 429);
    drop(under_way);
    assert_eq!(asked(&door, HOME, "/load", &[]), 200);
    assert_eq!(asked(&door, HOME, "/load", &[]), 429);
}

#[tokio::test]
async fn what_comes_on_streams_is_counted_before_it_is_a_request() {
    let limit = 1 << 20;
    let config = GuardConfig {
        quotas: QuotaLimits {
            bytes_in_flight: Some(dormouse_core::id::ByteSize(limit)),
            ..QuotaLimits::default()
        },
        ..GuardConfig::default()
    };
    let door = guard(config).door(Listener::Grpc, needs);
    let visitor = door.visitor(HOME, None);
    let piece = vec![0; 1 << 20];
    // What a stream brings, read to its end or to the error that is one.
    let read = async || {
        let body = Body::from(piece.clone());
        let request = Request::post("/stream").body(body).unwrap();
        let pass = visitor.admit(&request).unwrap();
        let (told, heard) = tokio::sync::oneshot::channel();
        let answer = move |request: Request<body::Counted<Body>>| async move {
            let (parts, body) = request.into_parts();
            let quota = parts.extensions.get::<StreamQuota>().unwrap().clone();
            let read = body.collect().await.map(|_| ());
            let error = read.err();
            let error = error.map(|error| *error.downcast::<tonic::Status>().unwrap());
            told.send((quota, error)).ok();
            Response::new(Body::empty())
        };
        pass.accompany(request, answer).await.unwrap();
        heard.await.unwrap()
    };
    let (first, error) = read().await;
    assert!(error.is_none(), "{error:?}");
    let (second, error) = read().await;
    assert_eq!(error.unwrap().code(), tonic::Code::ResourceExhausted);
    drop(second);
    let permit = first.enter(10).unwrap();
    let (_third, error) = read().await;
    assert!(error.is_none(), "{error:?}");
    drop(permit);
}

#[test]
fn a_credential_is_needed_with_the_right_scope() {
    let (guard, _file) = with_tokens();
    let door = guard.door(Listener::Http, needs);
    let reader = &[("authorization", "Bearer reader-0123456789")][..];
    let ops = &[("authorization", "bearer  ops-0123456789abc ")][..];
    for (path, none, by_reader, by_ops) in [
        ("/probe", 200, 200, 200),
        ("/metadata", 401, 200, 200),
        ("/infer", 401, 200, 403),
        ("/load", 401, 403, 200),
        ("/unload", 401, 403, 200),
        ("/metrics", 401, 403, 403),
        ("/nothing", 401, 200, 200),
    ] {
        assert_eq!(asked(&door, HOME, path, &[]), none, "{path}");
        assert_eq!(asked(&door, HOME, path, reader), by_reader, "{path}");
        assert_eq!(asked(&door, AWAY, path, ops), by_ops, "{path}");
    }
    for wrong in [
        "",
        "Bearer",
        "Bearer ",
        "Basic cmVhZGVy",
        "reader-0123456789",
        "Bearer x",
    ] {
        let headers = &[("authorization", wrong)];
        assert_eq!(asked(&door, HOME, "/infer", headers), 401, "{wrong}");
    }
    let twice = [reader[0], ops[0]];
    assert_eq!(asked(&door, HOME, "/infer", &twice), 401);
}

#[test]
fn a_certificate_is_a_credential_where_it_is_listed() {
    let (guard, _file) = with_tokens();
    let door = guard.door(Listener::Grpc, needs);
    let admitted = |names: &[&str], path: &str| {
        let visitor = door.visitor(AWAY, Some(names));
        visitor.admit(&request(path, &[])).map(|_| ())
    };
    assert!(admitted(&["keda"], "/metrics").is_ok());
    let refused = admitted(&["keda"], "/infer").unwrap_err();
    assert_eq!(refused.status().code(), tonic::Code::PermissionDenied);
    let refused = admitted(&["mallory"], "/metadata").unwrap_err();
    assert_eq!(refused.status().code(), tonic::Code::PermissionDenied);
}

#[test]
fn management_moves_to_its_own_listener() {
    let config = GuardConfig {
        management: Some(ListenConfig {
            address: SocketAddr::new(HOME, 0),
        }),
        ..GuardConfig::default()
    };
    let guard = guard(config);
    let (main, own) = (
        guard.door(Listener::Http, needs),
        guard.door(Listener::Management, needs),
    );
    assert_eq!(asked(&main, HOME, "/load", &[]), 403);
    assert_eq!(asked(&main, HOME, "/infer", &[]), 200);
    assert_eq!(asked(&own, HOME, "/load", &[]), 200);
    assert_eq!(asked(&own, AWAY, "/load", &[]), 403);
    assert_eq!(asked(&own, HOME, "/infer", &[]), 403);
    assert_eq!(asked(&own, HOME, "/metadata", &[]), 200);
}

#[test]
fn probes_can_be_guarded_too() {
    let (open, file) = with_tokens();
    let config = GuardConfig {
        guard_probes: true,
        ..open.config.clone()
    };
    let door = guard(config).door(Listener::Http, needs);
    assert_eq!(asked(&door, HOME, "/probe", &[]), 401);
    let ops = [("authorization", "Bearer ops-0123456789abc")];
    assert_eq!(asked(&door, HOME, "/probe", &ops), 200);
    drop(file);
}

#[tokio::test]
async fn a_request_holds_its_permit_until_its_answer_was_sent() {
    let (guard, _file) = with_tokens();
    let door = guard.door(Listener::Http, needs);
    let visitor = door.visitor(HOME, None);
    let ask = |body: &'static str| {
        Request::post("/infer")
            .header("authorization", "Bearer reader-0123456789")
            .body(Body::from(body))
            .unwrap()
    };
    let echo = async |request: Request<body::Counted<Body>>| {
        let body = request.into_body().collect().await;
        Response::new(body.map_or_else(|_| Body::empty(), |body| Body::from(body.to_bytes())))
    };
    let first = ask("0123456789");
    let pass = visitor.admit(&first).unwrap();
    let answer = pass.accompany(first, echo).await.unwrap();
    let refused = visitor.admit(&ask("")).unwrap_err();
    assert_eq!(refused.status().code(), tonic::Code::ResourceExhausted);
    let refused = refused.into_http();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.headers()["retry-after"], "1");
    drop(answer);
    let second = ask("0123456789a");
    let pass = visitor.admit(&second).unwrap();
    let refused = pass.accompany(second, echo).await.unwrap_err();
    assert_eq!(refused.status().code(), tonic::Code::ResourceExhausted);
    assert!(visitor.admit(&ask("")).is_ok());
}

#[test]
fn tokens_are_read_again_and_wrong_ones_change_nothing() {
    let (guard, file) = with_tokens();
    let door = guard.door(Listener::Http, needs);
    let ops = [("authorization", "Bearer ops-0123456789abc")];
    let mut watched = watch::watched(&guard.config);
    std::fs::write(file.path(), "[[token]]\nname = 1").unwrap();
    guard.follow_once(&mut watched);
    assert_eq!(asked(&door, HOME, "/load", &ops), 200);
    std::fs::write(
        file.path(),
        TOKENS.replace("ops-0123456789abc", "new-0123456789abc"),
    )
    .unwrap();
    guard.follow_once(&mut watched);
    assert_eq!(asked(&door, HOME, "/load", &ops), 401);
}

#[test]
fn files_that_could_not_be_read_are_tried_again_though_they_look_the_same() {
    use std::sync::atomic::{AtomicU32, Ordering};
    static TRIES: AtomicU32 = AtomicU32::new(0);
    let (guard, file) = with_tokens();
    let fails_once = |_: &Guard| match TRIES.fetch_add(1, Ordering::SeqCst) {
        0 => Err(GuardError::Read {
            what: "tokens",
            path: "tokens.toml".into(),
            source: std::io::Error::other("no descriptor is left"),
        }),
        _ => Ok(()),
    };
    let mut watched = watch::watched(&guard.config);
    watched[0].replace_reload(fails_once);
    std::fs::write(file.path(), "changed").unwrap();
    for tries in [1, 2, 2] {
        guard.follow_once(&mut watched);
        assert_eq!(TRIES.load(Ordering::SeqCst), tries);
    }
}

#[test]
fn listening_to_other_machines_needs_authentication_or_consent() {
    let everywhere: SocketAddr = "0.0.0.0:8000".parse().unwrap();
    let loopback: SocketAddr = "[::1]:8000".parse().unwrap();
    let closed = GuardConfig::default();
    assert!(closed.check_exposure(loopback).is_ok());
    let error = closed.check_exposure(everywhere).unwrap_err().to_string();
    assert!(error.contains("--allow-unauthenticated"), "{error}");
    assert_eq!(closed.default_address(), "127.0.0.1");
    let consent = GuardConfig {
        allow_unauthenticated: true,
        ..GuardConfig::default()
    };
    assert!(consent.check_exposure(everywhere).is_ok());
    assert_eq!(consent.default_address(), "0.0.0.0");
    let (guard, _file) = with_tokens();
    assert!(guard.config.check_exposure(everywhere).is_ok());
}
