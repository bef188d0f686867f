//! Paths and methods → what is asked for. Names are decoded and checked here, once.

use http::{Method, StatusCode};

use super::answer::Failure;

/// A model, and the version asked for ("" for the newest).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ModelRef {
    pub name: String,
    pub version: String,
}

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    ServerMetadata,
    Live,
    Ready,
    ModelMetadata(ModelRef),
    ModelReady(ModelRef),
    ModelConfig(ModelRef),
    /// With an empty name: of all models.
    Statistics(ModelRef),
    Infer(ModelRef),
    Index,
    Load(String),
    Unload(String),
    /// The OpenAI-style list.
    Models,
    /// Known to Triton's clients and not done here.
    Unsupported(&'static str),
}

const GET: &str = "GET, HEAD";
const POST: &str = "POST";
const GET_POST: &str = "GET, HEAD, POST";

/// A model's name as clients may write it.
const MAX_NAME: usize = 255;

const SHARED_MEMORY: &str = "shared memory is not supported by this server";
const TRACE: &str = "trace settings cannot be read or changed over the network";
const LOGGING: &str = "log settings cannot be read or changed over the network";
const GENERATE: &str = "the generate extension is not supported by this server; use 'infer'";
const REPOSITORY: &str = "naming a repository is not supported: leave it out of the path";

/// Finds the route of a request.
pub(super) fn find(method: &Method, path: &str) -> Result<Route, Failure> {
    let (route, methods) = match_path(path)?.ok_or_else(|| {
        let shown: String = path.chars().take(200).collect();
        Failure::new(StatusCode::NOT_FOUND, format!("no such endpoint: {shown}"))
    })?;
    if !methods
        .split(", ")
        .any(|allowed| allowed == method.as_str())
    {
        return Err(Failure {
            allow: Some(methods),
            ..Failure::new(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("method {method} is not allowed here: expected {methods}"),
            )
        });
    }
    Ok(route)
}

type Found = Option<(Route, &'static str)>;

fn match_path(path: &str) -> Result<Found, Failure> {
    let Some(path) = path.strip_prefix('/') else {
        return Ok(None);
    };
    // Nothing served has more segments than this.
    let segments: Vec<&str> = path.splitn(9, '/').collect();
    Ok(Some(match segments.as_slice() {
        ["v2"] => (Route::ServerMetadata, GET),
        ["v2", "health", "live"] => (Route::Live, GET),
        ["v2", "health", "ready"] => (Route::Ready, GET),
        ["v1", "models"] => (Route::Models, GET),
        ["v2", "models", "stats"] => (Route::Statistics(ModelRef::default()), GET),
        ["v2", "models", model, "versions", version, rest @ ..] => {
            if version.is_empty() || !version.bytes().all(|byte| byte.is_ascii_digit()) {
                return Err(Failure::bad_request(format!(
                    "model version '{}' is not a number",
                    version.escape_debug()
                )));
            }
            return match_model(model, version, rest);
        }
        ["v2", "models", model, rest @ ..] => return match_model(model, "", rest),
        ["v2", "repository", "index"] | ["v2", "repository", _, "index"] => (Route::Index, POST),
        ["v2", "repository", "models", model, "load"] => (Route::Load(name(model)?), POST),
        ["v2", "repository", "models", model, "unload"] => (Route::Unload(name(model)?), POST),
        ["v2", "repository", _, "models", _, "load" | "unload"] => {
            (Route::Unsupported(REPOSITORY), POST)
        }
        ["v2", "trace", "setting"] => (Route::Unsupported(TRACE), GET_POST),
        ["v2", "logging"] => (Route::Unsupported(LOGGING), GET_POST),
        ["v2", "systemsharedmemory" | "cudasharedmemory", action]
        | [
            "v2",
            "systemsharedmemory" | "cudasharedmemory",
            "region",
            _,
            action,
        ] => match *action {
            "status" => (Route::Unsupported(SHARED_MEMORY), GET),
            "register" | "unregister" => (Route::Unsupported(SHARED_MEMORY), POST),
            _ => return Ok(None),
        },
        _ => return Ok(None),
    }))
}

fn match_model(model: &str, version: &str, rest: &[&str]) -> Result<Found, Failure> {
    let (make, methods): (fn(ModelRef) -> Route, _) = match rest {
        [] => (Route::ModelMetadata, GET),
        ["ready"] => (Route::ModelReady, GET),
        ["config"] => (Route::ModelConfig, GET),
        ["stats"] => (Route::Statistics, GET),
        ["infer"] => (Route::Infer, POST),
        ["generate" | "generate_stream"] => (|_| Route::Unsupported(GENERATE), POST),
        ["trace", "setting"] => (|_| Route::Unsupported(TRACE), GET_POST),
        _ => return Ok(None),
    };
    let model = ModelRef {
        name: name(model)?,
        version: version.to_owned(),
    };
    Ok(Some((make(model), methods)))
}

/// Decodes a name from a path and refuses what could be read as a path again.
fn name(segment: &str) -> Result<String, Failure> {
    let refuse = |why: &str| {
        let shown: String = segment.chars().take(100).collect();
        Failure::bad_request(format!(
            "'{}' is not a model name: {why}",
            shown.escape_debug()
        ))
    };
    let decoded =
        percent_decode(segment).ok_or_else(|| refuse("its percent-encoding is broken"))?;
    if decoded.is_empty() || decoded.len() > MAX_NAME {
        return Err(refuse("expected 1 to 255 bytes"));
    }
    if decoded == "." || decoded == ".." {
        return Err(refuse("it names a directory"));
    }
    if decoded
        .chars()
        .any(|c| matches!(c, '/' | '\\') || c.is_control())
    {
        return Err(refuse("it has a slash, backslash or control character"));
    }
    Ok(decoded)
}

fn percent_decode(segment: &str) -> Option<String> {
    if !segment.contains('%') {
        return Some(segment.to_owned());
    }
    let mut bytes = segment.bytes();
    let mut decoded = Vec::with_capacity(segment.len());
    while let Some(byte) = bytes.next() {
        decoded.push(if byte == b'%' {
            let mut digit = || char::from(bytes.next()?).to_digit(16);
            (digit()? << 4 | digit()?) as u8
        } else {
            byte
        });
    }
    String::from_utf8(decoded).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str, version: &str) -> ModelRef {
        ModelRef {
            name: name.to_owned(),
            version: version.to_owned(),
        }
    }

    #[test]
    fn paths_are_tritons() {
        let get = Method::GET;
        let post = Method::POST;
        for (method, path, route) in [
            (&get, "/v2", Route::ServerMetadata),
            (&Method::HEAD, "/v2/health/live", Route::Live),
            (&get, "/v2/health/ready", Route::Ready),
            (&get, "/v2/models/m", Route::ModelMetadata(model("m", ""))),
            (
                &get,
                "/v2/models/m/versions/3",
                Route::ModelMetadata(model("m", "3")),
            ),
            (
                &get,
                "/v2/models/m/ready",
                Route::ModelReady(model("m", "")),
            ),
            (
                &get,
                "/v2/models/a%20b/versions/1/config",
                Route::ModelConfig(model("a b", "1")),
            ),
            (&get, "/v2/models/stats", Route::Statistics(model("", ""))),
            (
                &get,
                "/v2/models/stats/stats",
                Route::Statistics(model("stats", "")),
            ),
            (&post, "/v2/models/m/infer", Route::Infer(model("m", ""))),
            (
                &post,
                "/v2/models/m/versions/12/infer",
                Route::Infer(model("m", "12")),
            ),
            (&post, "/v2/repository/index", Route::Index),
            (&post, "/v2/repository/repo/index", Route::Index),
            (
                &post,
                "/v2/repository/models/m/load",
                Route::Load("m".to_owned()),
            ),
            (
                &post,
                "/v2/repository/models/m/unload",
                Route::Unload("m".to_owned()),
            ),
            (
                &post,
                "/v2/repository/repo/models/m/load",
                Route::Unsupported(REPOSITORY),
            ),
            (&get, "/v1/models", Route::Models),
            (&post, "/v2/logging", Route::Unsupported(LOGGING)),
            (
                &get,
                "/v2/systemsharedmemory/status",
                Route::Unsupported(SHARED_MEMORY),
            ),
            (
                &post,
                "/v2/cudasharedmemory/region/r/register",
                Route::Unsupported(SHARED_MEMORY),
            ),
            (
                &post,
                "/v2/models/m/generate_stream",
                Route::Unsupported(GENERATE),
            ),
            (
                &get,
                "/v2/models/m/trace/setting",
                Route::Unsupported(TRACE),
            ),
        ] {
            assert_eq!(find(method, path).unwrap(), route, "{path}");
        }
    }

    #[test]
    fn unknown_paths_are_not_found() {
        for path in [
            "",
            "/",
            "/v3",
            "/v2/",
            "/v2/models",
            "/v2/models/m/",
            "/v2/models/m/infer/",
            "/v2/models/m/nothing",
            "/v2/health",
            "/v2/repository",
            "/v2/models/m/versions/1/infer/a/b/c/d/e/f",
            "/metrics",
        ] {
            assert_eq!(find(&Method::GET, path).unwrap_err().status, 404, "{path}");
        }
    }

    #[test]
    fn wrong_methods_are_told_the_right_ones() {
        for (method, path, allow) in [
            (Method::GET, "/v2/models/m/infer", "POST"),
            (Method::POST, "/v2/health/live", "GET, HEAD"),
            (Method::DELETE, "/v2/logging", "GET, HEAD, POST"),
        ] {
            let failure = find(&method, path).unwrap_err();
            assert_eq!(failure.status, 405);
            assert_eq!(failure.allow, Some(allow));
        }
    }

    #[test]
    fn names_that_reach_elsewhere_are_refused() {
        let long = format!("/v2/models/{}/infer", "n".repeat(256));
        for path in [
            "/v2/models/..%2F..%2Fetc/infer",
            "/v2/models/a%2Fb/infer",
            "/v2/models/a%2fb/infer",
            "/v2/models/a%5cb/infer",
            "/v2/models/../infer",
            "/v2/models/%2e%2e/infer",
            "/v2/models/./infer",
            "/v2/models/a%00b/infer",
            "/v2/models/a%0ab/infer",
            "/v2/models/a%zz/infer",
            "/v2/models/a%/infer",
            "/v2/models/%ff/infer",
            "/v2/models//infer",
            "/v2/models/m/versions/x/infer",
            "/v2/models/m/versions/-1/infer",
            long.as_str(),
        ] {
            assert_eq!(find(&Method::POST, path).unwrap_err().status, 400, "{path}");
        }
    }
}
