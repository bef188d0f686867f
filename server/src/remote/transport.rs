//! The one way out to remote repositories: connects, speaks TLS, keeps connections, and goes
//! nowhere else than it may. Redirects of object stores are errors; those of web servers are
//! followed to where the allow-list allows.

mod body;
mod connect;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::header::{AUTHORIZATION, LOCATION};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};

use super::error::{ErrorKind, RemoteError, printable};
use super::location::Location;

use body::TimedBody;
use connect::Connect;
pub(super) use connect::{Addresses, tls_config};

/// How many times a web server may send us on.
const MAX_REDIRECTS: usize = 5;

/// How much of a failure's body is looked at.
const MAX_FAILURE: usize = 4 << 10;

/// Connections kept for the next request, per host.
const IDLE_CONNECTIONS: usize = 32;
const IDLE_FOR: Duration = Duration::from_secs(30);

/// How a transport behaves.
#[derive(Clone, Debug)]
pub(super) struct TransportOptions {
    /// Until the head of an answer is there, and between two pieces of its body.
    pub(super) patience: Duration,
    pub(super) tls: Arc<rustls::ClientConfig>,
    pub(super) addresses: Addresses,
    /// Where a web server may send us; none: nowhere, for object stores.
    pub(super) allowed: Option<Vec<Location>>,
    /// The server's ETags are MD5 digests unless it says otherwise.
    pub(super) tags_are_md5: bool,
    /// No answer has a longer body.
    pub(super) max_body: u64,
}

/// Speaks HTTP/1.1 to whoever it is allowed to.
#[derive(Clone, Debug)]
pub(super) struct Transport {
    client: Client<Connect, HttpRequestBody>,
    options: TransportOptions,
}

/// The MD5 digest of the whole object, from an answer's headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpectedMd5(pub(super) [u8; 16]);

impl Transport {
    pub(super) fn new(options: TransportOptions) -> Self {
        let connect = Connect::new(
            Arc::clone(&options.tls),
            options.addresses.clone(),
            options.patience,
        );
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_FOR)
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .build(connect);
        Self { client, options }
    }

    /// Sends a request and waits for the head of the answer, whatever it is.
    async fn exchange(
        &self,
        request: Request<HttpRequestBody>,
    ) -> Result<Response<Incoming>, RemoteError> {
        let host = host_of(request.uri());
        let answer = tokio::time::timeout(self.options.patience, self.client.request(request));
        match answer.await {
            Err(_) => Err(RemoteError::new(
                ErrorKind::Interrupted,
                format!("{host} did not answer within {:?}", self.options.patience),
            )),
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(failed(&host, &error)),
        }
    }

    /// As [`Transport::exchange`]; an answer that is no success is an error.
    async fn succeed(
        &self,
        request: Request<HttpRequestBody>,
    ) -> Result<Response<Incoming>, RemoteError> {
        let host = host_of(request.uri());
        let answer = self.exchange(request).await?;
        let status = answer.status();
        match status.is_success() {
            true => Ok(answer),
            false => Err(self.failure(&host, status, answer).await),
        }
    }

    async fn failure(
        &self,
        host: &str,
        status: StatusCode,
        answer: Response<Incoming>,
    ) -> RemoteError {
        let location = answer.headers().get(LOCATION).cloned();
        let region = answer.headers().get("x-amz-bucket-region").cloned();
        let mut start = Vec::new();
        let mut body = TimedBody::new(answer.into_body(), self.options.patience, u64::MAX);
        while start.len() < MAX_FAILURE
            && let Some(Ok(frame)) = body.frame().await
        {
            start.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
        }
        start.truncate(MAX_FAILURE);
        let mut error = RemoteError::of_status(host, status, &String::from_utf8_lossy(&start));
        if let Some(region) = region.as_ref().and_then(|region| region.to_str().ok())
            && status != StatusCode::NOT_FOUND
        {
            let region = printable(region);
            error.message += &format!("; the bucket is in region {region} (AWS_REGION)");
        } else if let Some(target) = location.as_ref().and_then(|target| target.to_str().ok()) {
            error.message += &format!("; it leads to {}, which is not followed", printable(target));
        }
        error
    }

    /// Gets something from a web server, following it to where it may send us.
    pub(super) async fn get(
        &self,
        url: &str,
        headers: HeaderMap,
    ) -> Result<Response<HttpResponseBody>, RemoteError> {
        self.get_up_to(url, headers, self.options.max_body).await
    }

    /// As [`Transport::get`], with a body of up to `most` bytes.
    pub(super) async fn get_up_to(
        &self,
        url: &str,
        headers: HeaderMap,
        most: u64,
    ) -> Result<Response<HttpResponseBody>, RemoteError> {
        let mut headers = headers;
        let mut uri = web_uri(url)?;
        for _ in 0..=MAX_REDIRECTS {
            self.check_web(&uri)?;
            let mut request = Request::new(HttpRequestBody::empty());
            *request.method_mut() = Method::GET;
            *request.uri_mut() = uri.clone();
            *request.headers_mut() = headers.clone();
            let answer = self.exchange(request).await?;
            let status = answer.status();
            let host = host_of(&uri);
            let moved = matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308);
            let target = answer.headers().get(LOCATION).filter(|_| moved);
            let Some(target) = target.and_then(|target| target.to_str().ok()) else {
                return match status.is_success() {
                    true => Ok(self.finish(answer, most)),
                    false => Err(self.failure(&host, status, answer).await),
                };
            };
            let next = join(&uri, target)?;
            if (next.scheme(), next.authority()) != (uri.scheme(), uri.authority()) {
                headers.remove(AUTHORIZATION);
            }
            uri = next;
        }
        Err(RemoteError::new(
            ErrorKind::Refused,
            format!("{} redirects too often", host_of(&uri)),
        ))
    }

    /// Fails unless a web address lies in what is allowed.
    fn check_web(&self, uri: &Uri) -> Result<(), RemoteError> {
        let allowed = self.options.allowed.as_deref().unwrap_or_default();
        let path = uri.path().trim_end_matches('/');
        let base = format!(
            "{}://{}{path}",
            uri.scheme_str().unwrap_or_default(),
            uri.authority().map_or("", |authority| authority.as_str()),
        );
        // What a server may take for dots or slashes is not within anything.
        let disguised = ["%2e", "%2f", "%5c"];
        let lower = path.to_ascii_lowercase();
        if disguised.iter().any(|code| lower.contains(code)) {
            return Err(RemoteError::new(
                ErrorKind::Refused,
                format!(
                    "{} is not followed: its path has a disguised dot or slash",
                    printable(&base)
                ),
            ));
        }
        let location = Location::parse(&base).map_err(|error| {
            RemoteError::new(
                ErrorKind::Refused,
                format!("{} is not followed: {error}", printable(&base)),
            )
        })?;
        match allowed.iter().any(|allowed| location.is_within(allowed)) {
            true => Ok(()),
            false => Err(RemoteError::new(
                ErrorKind::Refused,
                format!(
                    "{} may not be reached: --allow-repository can allow it",
                    printable(&base)
                ),
            )),
        }
    }

    fn finish(&self, answer: Response<Incoming>, most: u64) -> Response<HttpResponseBody> {
        let (mut parts, body) = answer.into_parts();
        if let Some(md5) = expected_md5(&parts.headers, self.options.tags_are_md5) {
            parts.extensions.insert(md5);
        }
        let body = TimedBody::new(body, self.options.patience, most);
        Response::from_parts(parts, HttpResponseBody::new(body))
    }
}

impl HttpService for Transport {
    fn call<'a, 'f>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'f>>
    where
        'a: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            let answer = self.succeed(request).await.map_err(|error| {
                let kind = match error.kind {
                    ErrorKind::Unreachable => HttpErrorKind::Connect,
                    ErrorKind::Interrupted => HttpErrorKind::Interrupted,
                    _ => HttpErrorKind::Unknown,
                };
                HttpError::new(kind, error)
            })?;
            Ok(self.finish(answer, self.options.max_body))
        })
    }
}

impl HttpConnector for Transport {
    fn connect(&self, _options: &object_store::ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

fn host_of(uri: &Uri) -> String {
    uri.authority()
        .map(|authority| authority.as_str().to_owned())
        .unwrap_or_default()
}

fn web_uri(url: &str) -> Result<Uri, RemoteError> {
    url.parse().map_err(|_| {
        RemoteError::new(
            ErrorKind::Malformed,
            format!("'{}' is not an address", printable(url)),
        )
    })
}

/// Where a redirect leads; it may be relative to the host.
fn join(from: &Uri, target: &str) -> Result<Uri, RemoteError> {
    if target.starts_with('/') && !target.starts_with("//") {
        let scheme = from.scheme_str().unwrap_or("https");
        return web_uri(&format!("{scheme}://{}{target}", host_of(from)));
    }
    let uri = web_uri(target)?;
    match (uri.scheme_str(), uri.authority()) {
        (Some(_), Some(_)) => Ok(uri),
        _ => Err(RemoteError::new(
            ErrorKind::Refused,
            format!("{} redirects to a relative path", host_of(from)),
        )),
    }
}

fn failed(host: &str, error: &hyper_util::client::legacy::Error) -> RemoteError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut last = String::new();
    while let Some(current) = cause {
        if let Some(own) = current.downcast_ref::<RemoteError>() {
            return own.clone();
        }
        last = current.to_string();
        cause = current.source();
    }
    RemoteError::new(
        ErrorKind::Interrupted,
        format!("the connection to {host} failed: {}", printable(&last)),
    )
}

/// The digest that an answer's headers tell of the whole object.
fn expected_md5(headers: &HeaderMap, tags_are_md5: bool) -> Option<ExpectedMd5> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let google = headers.get_all("x-goog-hash").iter().find_map(|value| {
        let parts = value.to_str().ok()?.split(',');
        parts
            .into_iter()
            .find_map(|part| part.trim().strip_prefix("md5="))
    });
    // Google stores some files compressed and tells the digest of that.
    let is_plain = text("x-goog-stored-content-encoding").is_none_or(|coding| coding == "identity");
    if let Some(encoded) = google
        .filter(|_| is_plain)
        .or(text("x-ms-blob-content-md5"))
    {
        return base64_16(encoded).map(ExpectedMd5);
    }
    if !tags_are_md5 || text("x-amz-server-side-encryption-customer-algorithm").is_some() {
        return None;
    }
    match text("x-amz-server-side-encryption") {
        None => {}
        // AWS encrypts everything like this and keeps to MD5; others may not.
        Some("AES256") if text("server") == Some("AmazonS3") => {}
        Some(_) => return None,
    }
    hex_16(text("etag")?.trim_matches('"')).map(ExpectedMd5)
}

fn hex_16(text: &str) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let digits = text.as_bytes();
    if digits.len() != 32 {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

fn base64_16(text: &str) -> Option<[u8; 16]> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits = text.trim_end_matches('=');
    if digits.len() != 22 {
        return None;
    }
    let mut bytes = [0; 16];
    let (mut bits, mut held, mut at) = (0u32, 0u32, 0);
    for byte in digits.bytes() {
        bits = (bits << 6 | u32::from(digit(byte)?)) & 0xffff;
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes[at] = (bits >> held) as u8;
            at += 1;
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests;
