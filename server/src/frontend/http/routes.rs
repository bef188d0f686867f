//! Paths and methods → what is asked for, and what that needs. Names are decoded and checked here, once.

use http::{Method, StatusCode};
use smallvec::SmallVec;

use super::answer::Failure;
use crate::guard::Need;

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
    /// Log settings, and whether they are to be changed.
    LogSettings(Access),
    /// Trace settings of a model, or of all with an empty name.
    TraceSettings(String, Access),
    /// An empty name stands for all regions.
    RegionStatus(Memory, String),
    RegisterRegion(Memory, String),
    UnregisterRegion(Memory, String),
    /// The OpenAI-style list.
    Models,
    /// What the server is doing now.
    Overview,
    OpenApi,
    /// A file of the page, by its name; "" for the page itself.
    Page(String),
    /// Known to Triton's clients and not done here.
    Unsupported(&'static str),
}

/// What is done with settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Change,
}

/// Whose memory a region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    System,
    Cuda,
}

const GET: &str = "GET, HEAD";
const POST: &str = "POST";
const GET_POST: &str = "GET, HEAD, POST";

/// A model's name as clients may write it.
const MAX_NAME: usize = 255;

const GENERATE: &str = "the generate extension is not supported by this server; use 'infer'";
const REPOSITORY: &str = "naming a repository is not supported: leave it out of the path";

/// A row of the table: what its paths look like, how they may be asked for, and what that needs.
struct Row {
    path: &'static [&'static str],
    methods: &'static str,
    need: Need,
    route: fn(ModelRef, Access) -> Route,
}

/// A segment with a model's name; `versions/NUMBER` may follow it.
const MODEL: &str = "{model}";
/// A segment with a model's name and nothing after it.
const NAME: &str = "{name}";
/// A segment that is not looked at.
const ANY: &str = "{any}";

const fn row(
    path: &'static [&'static str],
    methods: &'static str,
    need: Need,
    route: fn(ModelRef, Access) -> Route,
) -> Row {
    Row {
        path,
        methods,
        need,
        route,
    }
}

/// Every route of the HTTP port, with what it needs. The first row that fits is the one.
#[rustfmt::skip]
static TABLE: &[Row] = &[
    row(&["v2", "models", MODEL, "infer"], POST, Need::Inference, |model, _| Route::Infer(model)),
    row(&["v2"], GET, Need::Metadata, |_, _| Route::ServerMetadata),
    row(&["v2", "health", "live"], GET, Need::Probe, |_, _| Route::Live),
    row(&["v2", "health", "ready"], GET, Need::Probe, |_, _| Route::Ready),
    row(&["v1", "models"], GET, Need::Metadata, |_, _| Route::Models),
    row(&["v2", "models", "stats"], GET, Need::Metadata, |model, _| Route::Statistics(model)),
    row(&["v2", "models", MODEL], GET, Need::Metadata, |model, _| Route::ModelMetadata(model)),
    row(&["v2", "models", MODEL, "ready"], GET, Need::Metadata, |model, _| Route::ModelReady(model)),
    row(&["v2", "models", MODEL, "config"], GET, Need::Metadata, |model, _| Route::ModelConfig(model)),
    row(&["v2", "models", MODEL, "stats"], GET, Need::Metadata, |model, _| Route::Statistics(model)),
    row(&["v2", "models", MODEL, "generate"], POST, Need::Inference, |_, _| Route::Unsupported(GENERATE)),
    row(&["v2", "models", MODEL, "generate_stream"], POST, Need::Inference, |_, _| Route::Unsupported(GENERATE)),
    row(&["v2", "repository", "index"], POST, Need::Metadata, |_, _| Route::Index),
    row(&["v2", "repository", ANY, "index"], POST, Need::Metadata, |_, _| Route::Index),
    row(&["v2", "repository", "models", NAME, "load"], POST, Need::Load, |model, _| Route::Load(model.name)),
    row(&["v2", "repository", "models", NAME, "unload"], POST, Need::Management, |model, _| Route::Unload(model.name)),
    row(&["v2", "repository", ANY, "models", ANY, "load"], POST, Need::Load, |_, _| Route::Unsupported(REPOSITORY)),
    row(&["v2", "repository", ANY, "models", ANY, "unload"], POST, Need::Management, |_, _| Route::Unsupported(REPOSITORY)),
    row(&["v2", "models", NAME, "trace", "setting"], GET_POST, Need::Management, |model, access| Route::TraceSettings(model.name, access)),
    row(&["v2", "trace", "setting"], GET_POST, Need::Management, |_, access| Route::TraceSettings(String::new(), access)),
    row(&["v2", "logging"], GET_POST, Need::Management, |_, access| Route::LogSettings(access)),
    row(&["v2", "systemsharedmemory", "status"], GET, Need::SharedMemory, |_, _| Route::RegionStatus(Memory::System, String::new())),
    row(&["v2", "systemsharedmemory", "unregister"], POST, Need::SharedMemory, |_, _| Route::UnregisterRegion(Memory::System, String::new())),
    row(&["v2", "systemsharedmemory", "region", NAME, "status"], GET, Need::SharedMemory, |region, _| Route::RegionStatus(Memory::System, region.name)),
    row(&["v2", "systemsharedmemory", "region", NAME, "register"], POST, Need::SharedMemory, |region, _| Route::RegisterRegion(Memory::System, region.name)),
    row(&["v2", "systemsharedmemory", "region", NAME, "unregister"], POST, Need::SharedMemory, |region, _| Route::UnregisterRegion(Memory::System, region.name)),
    row(&["v2", "cudasharedmemory", "status"], GET, Need::SharedMemory, |_, _| Route::RegionStatus(Memory::Cuda, String::new())),
    row(&["v2", "cudasharedmemory", "unregister"], POST, Need::SharedMemory, |_, _| Route::UnregisterRegion(Memory::Cuda, String::new())),
    row(&["v2", "cudasharedmemory", "region", NAME, "status"], GET, Need::SharedMemory, |region, _| Route::RegionStatus(Memory::Cuda, region.name)),
    row(&["v2", "cudasharedmemory", "region", NAME, "register"], POST, Need::SharedMemory, |region, _| Route::RegisterRegion(Memory::Cuda, region.name)),
    row(&["v2", "cudasharedmemory", "region", NAME, "unregister"], POST, Need::SharedMemory, |region, _| Route::UnregisterRegion(Memory::Cuda, region.name)),
    row(&["v2", "dormouse", "overview"], GET, Need::Metadata, |_, _| Route::Overview),
    row(&["openapi.json"], GET, Need::Metadata, |_, _| Route::OpenApi),
    row(&[""], GET, Need::Page, |_, _| Route::Page(String::new())),
    row(&["page", NAME], GET, Need::Page, |file, _| Route::Page(file.name)),
];

/// Finds the route of a request.
pub(super) fn find(method: &Method, path: &str) -> Result<Route, Failure> {
    let segments = segments(path);
    let (row, model, version) = match_path(&segments).ok_or_else(|| {
        let shown: String = path.chars().take(200).collect();
        Failure::new(StatusCode::NOT_FOUND, format!("no such endpoint: {shown}"))
    })?;
    if !version.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Failure::bad_request(format!(
            "model version '{}' is not a number",
            version.escape_debug()
        )));
    }
    let model = match model {
        Some(model) => ModelRef {
            name: name(model)?,
            version: version.to_owned(),
        },
        None => ModelRef::default(),
    };
    let methods = row.methods;
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
    let access = match *method {
        Method::POST => Access::Change,
        _ => Access::Read,
    };
    Ok((row.route)(model, access))
}

/// What a request needs, whatever its method: the wrong one is told only to who may know.
pub(crate) fn need(_: &Method, path: &str) -> Need {
    match_path(&segments(path)).map_or(Need::Unknown, |(row, ..)| row.need)
}

/// Every route as `(path, method, need)`, with braces around what may be anything.
pub(crate) fn listed() -> impl Iterator<Item = (String, &'static str, Need)> {
    TABLE.iter().flat_map(|row| {
        let path = format!("/{}", row.path.join("/"));
        let methods = row.methods.split(", ").filter(|method| *method != "HEAD");
        methods.map(move |method| (path.clone(), method, row.need))
    })
}

/// Nothing served has more segments than this.
type Segments<'a> = SmallVec<[&'a str; 9]>;

fn segments(path: &str) -> Segments<'_> {
    match path.strip_prefix('/') {
        Some(path) => path.splitn(9, '/').collect(),
        None => SmallVec::new(),
    }
}

/// The row, with the model and version ("" for none) that the path names.
fn match_path<'a>(segments: &[&'a str]) -> Option<(&'static Row, Option<&'a str>, &'a str)> {
    TABLE.iter().find_map(|row| {
        let (model, version) = row.matches(segments)?;
        Some((row, model, version))
    })
}

impl Row {
    fn matches<'a>(&self, segments: &[&'a str]) -> Option<(Option<&'a str>, &'a str)> {
        let (mut model, mut version) = (None, "");
        let mut rest = segments;
        for pattern in self.path {
            let (&segment, after) = rest.split_first()?;
            rest = after;
            match *pattern {
                ANY => {}
                NAME => model = Some(segment),
                MODEL => {
                    model = Some(segment);
                    if let ["versions", number, after @ ..] = rest {
                        // Not a number, so that it is refused as one.
                        version = if number.is_empty() { "?" } else { number };
                        rest = after;
                    }
                }
                expected if expected == segment => {}
                _ => return None,
            }
        }
        rest.is_empty().then_some((model, version))
    }
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

pub(super) fn percent_decode(segment: &str) -> Option<String> {
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
            (&post, "/v2/logging", Route::LogSettings(Access::Change)),
            (&get, "/v2/logging", Route::LogSettings(Access::Read)),
            (
                &get,
                "/v2/systemsharedmemory/status",
                Route::RegionStatus(Memory::System, String::new()),
            ),
            (
                &post,
                "/v2/cudasharedmemory/region/r/register",
                Route::RegisterRegion(Memory::Cuda, "r".to_owned()),
            ),
            (
                &post,
                "/v2/systemsharedmemory/region/a%20b/unregister",
                Route::UnregisterRegion(Memory::System, "a b".to_owned()),
            ),
            (
                &post,
                "/v2/models/m/generate_stream",
                Route::Unsupported(GENERATE),
            ),
            (
                &get,
                "/v2/models/m/trace/setting",
                Route::TraceSettings("m".to_owned(), Access::Read),
            ),
        ] {
            assert_eq!(find(method, path).unwrap(), route, "{path}");
        }
    }

    #[test]
    fn unknown_paths_are_not_found() {
        for path in [
            "",
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
