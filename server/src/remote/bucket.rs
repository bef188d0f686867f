//! Lists and reads: an object store by its own API, a web server by its index.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use dormouse_model_store::repository::RemoteFile;
use futures_util::StreamExt;
use http::header::{AUTHORIZATION, CONTENT_RANGE, ETAG, IF_MATCH, RANGE};
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body_util::BodyExt;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore};

use super::error::{ErrorKind, RemoteError};
use super::index_file::{self, INDEX_FILE, MAX_INDEX_BYTES};
use super::location::Location;
use super::transport::{ExpectedMd5, Transport};

/// The most files of one repository.
const MAX_FILES: usize = 1_000_000;

/// The most bytes of all their names and tags.
const MAX_LISTED: usize = 256 << 20;

/// Something that models are fetched from.
#[derive(Clone, Debug)]
pub(super) enum Bucket {
    Objects {
        store: Arc<dyn ObjectStore>,
        prefix: Path,
    },
    Web(Arc<Web>),
}

/// A folder on a web server.
#[derive(Debug)]
pub(super) struct Web {
    transport: Transport,
    base: String,
    token: Option<HeaderValue>,
}

/// A part of a file.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) bytes: Bytes,
    /// Of the whole file, if the server tells.
    pub(super) md5: Option<ExpectedMd5>,
    /// The state that the server says the file is in, to compare with that of other pieces.
    pub(super) tag: Option<String>,
    /// It is the whole file, though only a part was asked for.
    pub(super) is_whole: bool,
}

impl Bucket {
    pub(super) fn objects(
        store: Arc<dyn ObjectStore>,
        location: &Location,
    ) -> Result<Self, RemoteError> {
        let prefix = match location {
            Location::S3 { prefix, .. }
            | Location::Google { prefix, .. }
            | Location::Azure { prefix, .. } => prefix.as_str(),
            Location::Web { .. } => "",
        };
        let prefix = Path::parse(prefix).map_err(|error| {
            RemoteError::new(
                ErrorKind::Malformed,
                format!("not a usable prefix: {error}"),
            )
        })?;
        Ok(Self::Objects { store, prefix })
    }

    pub(super) fn web(transport: Transport, base: &str, token: Option<HeaderValue>) -> Self {
        Self::Web(Arc::new(Web {
            transport,
            base: base.to_owned(),
            token,
        }))
    }

    /// The files of the repository, or of one of its models.
    pub(super) async fn list(&self, model: Option<&str>) -> Result<Vec<RemoteFile>, RemoteError> {
        let (store, prefix) = match self {
            Self::Objects { store, prefix } => (store, prefix),
            Self::Web(web) => return web.list().await,
        };
        let below = match model {
            Some(model) => joined(prefix, model)?,
            None => prefix.clone(),
        };
        let mut objects = store.list(Some(&below));
        let mut files = Vec::new();
        let mut room = MAX_LISTED;
        while let Some(object) = objects.next().await {
            let object = object.map_err(|error| RemoteError::of_store(&error))?;
            let tags = object.e_tag.iter().chain(&object.version).map(String::len);
            let path: &str = object.location.as_ref();
            let names = path.len() + tags.sum::<usize>();
            let Some(left) = room.checked_sub(names) else {
                return Err(RemoteError::new(
                    ErrorKind::Malformed,
                    format!("the names of its files take more than {MAX_LISTED} bytes"),
                ));
            };
            room = left;
            if files.len() >= MAX_FILES {
                return Err(RemoteError::new(
                    ErrorKind::Malformed,
                    format!("there are more than {MAX_FILES} files in it"),
                ));
            }
            files.extend(listed(object, prefix));
        }
        Ok(files)
    }

    /// Reads a part of a file, or all of it; fails when it is not in the state it was listed in.
    pub(super) async fn read(
        &self,
        file: &RemoteFile,
        range: Option<Range<u64>>,
        tag: Option<&str>,
    ) -> Result<Piece, RemoteError> {
        let expected = match &range {
            Some(range) => range.end - range.start,
            None => file.size,
        };
        let piece = match self {
            Self::Objects { store, prefix } => read_object(store, prefix, file, range).await?,
            Self::Web(web) => web.read(file, range, tag).await?,
        };
        if !piece.is_whole && piece.bytes.len() as u64 != expected {
            return Err(RemoteError::new(
                ErrorKind::Damaged,
                format!(
                    "{expected} bytes were asked for, {} came",
                    piece.bytes.len()
                ),
            ));
        }
        Ok(piece)
    }
}

fn joined(prefix: &Path, path: &str) -> Result<Path, RemoteError> {
    let path = format!("{prefix}/{path}");
    Path::parse(path.trim_start_matches('/')).map_err(|error| {
        RemoteError::new(ErrorKind::Malformed, format!("not a usable path: {error}"))
    })
}

fn listed(object: ObjectMeta, prefix: &Path) -> Option<RemoteFile> {
    let path: Vec<_> = object.location.prefix_match(prefix)?.collect();
    let path: Vec<&str> = path.iter().map(AsRef::as_ref).collect();
    let path = path.join("/");
    (!path.is_empty()).then(|| RemoteFile {
        path,
        size: object.size,
        modified_ns: object.last_modified.timestamp_nanos_opt().unwrap_or(0),
        tag: object.e_tag,
        generation: object.version,
    })
}

async fn read_object(
    store: &Arc<dyn ObjectStore>,
    prefix: &Path,
    file: &RemoteFile,
    range: Option<Range<u64>>,
) -> Result<Piece, RemoteError> {
    let changed = || {
        RemoteError::new(
            ErrorKind::Changed,
            "it was replaced while it was being fetched".to_owned(),
        )
    };
    let path = joined(prefix, &file.path)?;
    // A weak tag promises nothing about bytes, and no server matches it.
    let strong = file.tag.as_ref().filter(|tag| !tag.starts_with("W/"));
    let options = GetOptions {
        if_match: strong.map(|tag| format!("\"{}\"", bare(tag))),
        version: file.generation.clone(),
        range: range.map(GetRange::Bounded),
        ..GetOptions::default()
    };
    let answer = store.get_opts(&path, options).await;
    let answer = answer.map_err(|error| RemoteError::of_store(&error))?;
    let meta = &answer.meta;
    let same_tag = match (&meta.e_tag, &file.tag) {
        (Some(now), Some(then)) => bare(now) == bare(then),
        // Not every server lists tags, and a listing tells of a second's parts, a header of none.
        _ => meta.last_modified.timestamp() == file.modified_ns.div_euclid(1_000_000_000),
    };
    if meta.size != file.size || !same_tag {
        return Err(changed());
    }
    let md5 = answer.extensions.get::<ExpectedMd5>().copied();
    let bytes = answer.bytes().await;
    Ok(Piece {
        bytes: bytes.map_err(|error| RemoteError::of_store(&error))?,
        md5,
        tag: None,
        is_whole: false,
    })
}

/// A tag as it is in listings of some and in headers of others.
fn bare(tag: &str) -> &str {
    tag.trim_start_matches("W/").trim_matches('"')
}

impl Web {
    fn headers(&self) -> HeaderMap {
        let token = self.token.iter().cloned();
        token.map(|token| (AUTHORIZATION, token)).collect()
    }

    async fn list(&self) -> Result<Vec<RemoteFile>, RemoteError> {
        let url = format!("{}/{INDEX_FILE}", self.base);
        let answer = self.transport.get(&url, self.headers()).await;
        let answer = answer.map_err(|error| match error.kind {
            ErrorKind::NotFound => RemoteError::new(
                error.kind,
                format!(
                    "{error} for {INDEX_FILE}: `dormouse repository index DIR` writes it for a folder"
                ),
            ),
            _ => error,
        })?;
        let bytes = gather(answer.into_body(), MAX_INDEX_BYTES).await?;
        index_file::parse(&bytes)
    }

    async fn read(
        &self,
        file: &RemoteFile,
        range: Option<Range<u64>>,
        tag: Option<&str>,
    ) -> Result<Piece, RemoteError> {
        let mut headers = self.headers();
        if let Some(range) = &range {
            let value = format!("bytes={}-{}", range.start, range.end.saturating_sub(1));
            headers.insert(RANGE, value.parse().expect("digits and a dash"));
        }
        if let Some(tag) = tag.and_then(|tag| tag.parse().ok()) {
            headers.insert(IF_MATCH, tag);
        }
        let path: Vec<String> = file.path.split('/').map(encoded).collect();
        let url = format!("{}/{}", self.base, path.join("/"));
        let answer = self.transport.get(&url, headers).await?;
        let (parts, body) = answer.into_parts();
        let text = |name| {
            parts
                .headers
                .get(name)
                .and_then(|value: &HeaderValue| value.to_str().ok())
        };
        let is_whole = range.is_some() && parts.status != StatusCode::PARTIAL_CONTENT;
        let limit = match &range {
            Some(range) if !is_whole => {
                let expected = format!("bytes {}-{}/", range.start, range.end.saturating_sub(1));
                if text(CONTENT_RANGE).is_none_or(|told| !told.starts_with(&expected)) {
                    return Err(RemoteError::new(
                        ErrorKind::Malformed,
                        "the server sent another part than the one that was asked for".to_owned(),
                    ));
                }
                range.end - range.start
            }
            _ => file.size,
        };
        let tag = text(ETAG).filter(|tag| !tag.starts_with("W/"));
        let tag = tag.map(str::to_owned);
        Ok(Piece {
            // Whoever asked for a part has no room for the whole: it is asked for differently.
            bytes: match is_whole {
                true => Bytes::new(),
                false => gather(body, limit).await?,
            },
            md5: None,
            tag,
            is_whole,
        })
    }

    /// A whole file, piece by piece, from a server that knows no ranges.
    pub(super) async fn stream(
        &self,
        file: &RemoteFile,
    ) -> Result<object_store::client::HttpResponseBody, RemoteError> {
        let path: Vec<String> = file.path.split('/').map(encoded).collect();
        let url = format!("{}/{}", self.base, path.join("/"));
        let most = file.size;
        let answer = self.transport.get_up_to(&url, self.headers(), most).await?;
        Ok(answer.into_body())
    }
}

/// All of a body, as long as it is no longer than it may be.
async fn gather(
    mut body: object_store::client::HttpResponseBody,
    limit: u64,
) -> Result<Bytes, RemoteError> {
    let mut bytes = BytesMut::new();
    while let Some(data) = next_data(&mut body).await? {
        if bytes.len() as u64 + data.len() as u64 > limit {
            return Err(RemoteError::new(
                ErrorKind::Damaged,
                format!("more than {limit} bytes came"),
            ));
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}

/// The next piece of a body.
pub(super) async fn next_data(
    body: &mut object_store::client::HttpResponseBody,
) -> Result<Option<Bytes>, RemoteError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            let own = std::error::Error::source(&error)
                .and_then(|source| source.downcast_ref::<RemoteError>());
            own.cloned().unwrap_or_else(|| {
                RemoteError::new(ErrorKind::Interrupted, "the connection broke".to_owned())
            })
        })?;
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// A part of a path as it stands in an address.
fn encoded(part: &str) -> String {
    let mut shown = String::with_capacity(part.len());
    for byte in part.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                shown.push(char::from(byte));
            }
            byte => shown.push_str(&format!("%{byte:02X}")),
        }
    }
    shown
}
