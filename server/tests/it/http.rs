//! Just enough HTTP/1.1 to say exactly what goes over the wire.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// An HTTP answer, its body put together.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Names in lower case.
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find_map(|(found, value)| (found == name).then_some(value.as_str()))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body)
            .with_context(|| format!("status {}, not JSON: {}", self.status, self.text()))
    }

    /// The text of an error answer.
    pub(crate) fn error(&self) -> Result<String> {
        let body = self.json()?;
        let error = body["error"].as_str();
        Ok(error
            .with_context(|| format!("no error in {body}"))?
            .to_owned())
    }
}

/// The value of a header that shows a token.
pub(crate) fn bearer(token: &str) -> String {
    format!("Bearer {token}")
}

/// As [`call`], showing a token.
pub(crate) async fn call_as(
    address: SocketAddr,
    method: &str,
    path: &str,
    token: &str,
    body: &[u8],
) -> Result<Answer> {
    let value = bearer(token);
    call(address, method, path, &[("authorization", &value)], body).await
}

/// One request on a connection of its own.
pub(crate) async fn call(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Result<Answer> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if method != "GET" {
        head.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    head.push_str("\r\n");
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(head.as_bytes()).await?;
    // A server may answer and close before it has read a body it refuses.
    let _ = stream.write_all(body).await;
    read_answer(&mut stream).await
}

/// Reads one answer up to the end of the connection.
pub(crate) async fn read_answer(stream: &mut TcpStream) -> Result<Answer> {
    let mut all = Vec::new();
    if let Err(error) = stream.read_to_end(&mut all).await
        && all.is_empty()
    {
        return Err(error).context("no answer");
    }
    parse(&all)
}

fn parse(all: &[u8]) -> Result<Answer> {
    let end = all
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .with_context(|| format!("no end of headers in {} bytes", all.len()))?;
    let head = std::str::from_utf8(&all[..end])?;
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .and_then(|line| line.split(' ').nth(1))
        .context("no status line")?
        .parse()?;
    let headers: Vec<_> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let mut answer = Answer {
        status,
        headers,
        body: Vec::new(),
    };
    let rest = &all[end + 4..];
    if answer.header("transfer-encoding") == Some("chunked") {
        answer.body = unchunk(rest)?;
    } else if let Some(length) = answer.header("content-length") {
        let length: usize = length.parse()?;
        ensure!(
            rest.len() == length,
            "content-length {length}, {} bytes",
            rest.len()
        );
        answer.body = rest.to_vec();
    } else {
        answer.body = rest.to_vec();
    }
    Ok(answer)
}

fn unchunk(mut rest: &[u8]) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line_end = rest
            .windows(2)
            .position(|window| window == b"\r\n")
            .context("a chunk without its size")?;
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line_end])?.trim(), 16)?;
        rest = &rest[line_end + 2..];
        if size == 0 {
            return Ok(body);
        }
        if rest.len() < size + 2 {
            bail!("a chunk of {size} bytes was cut short");
        }
        body.extend_from_slice(&rest[..size]);
        rest = &rest[size + 2..];
    }
}
