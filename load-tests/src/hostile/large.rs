//! A tensor of almost two gibibytes where that is allowed, and one that is larger than allowed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::{HostileArgs, Shown};
use crate::bars::Bar;
use crate::victim::{Guest, Victim};

const MODEL: &str = "mlp";
/// 1.9 GiB, in whole blocks.
const LARGE: u64 = 1945 << 20;
const TOO_LARGE: u64 = 3 << 30;
const BLOCK: usize = 1 << 20;
/// What server and kernel need for it, sent and answered.
const NEEDED: u64 = 10 << 30;
const PATIENCE: Duration = Duration::from_secs(120);

pub(super) async fn run(args: &HostileArgs) -> Result<Shown> {
    let mut shown = Shown::new("large");
    let available = available_memory()?;
    if available < NEEDED {
        let found = format!("{} GiB of memory are there", available >> 30);
        let bar = Bar::new("a tensor of 1.9 GiB comes back", "equal", found, false);
        shown.bar(bar.unjudged());
        return Ok(shown);
    }
    let flags = ["--keep-alive=forever", "--http-max-input-size=2GiB"];
    let victim = Victim::start(&args.server, &flags, None).await?;
    let guest = Guest::new(victim.http()?, MODEL);
    let before = guest.usual().await?;
    let address = victim.http_address()?.to_owned();
    let block = block();
    let sent = exchange(&address, &block, LARGE);
    let answer = tokio::time::timeout(PATIENCE, sent).await;
    let answer = answer.context("no answer to 1.9 GiB")??;
    shown.bar(Bar::new(
        "a tensor of 1.9 GiB comes back",
        "200, equal",
        answer.describe(),
        answer.status == 200 && answer.is_equal,
    ));
    let refused = exchange(&address, &block, TOO_LARGE);
    let answer = tokio::time::timeout(PATIENCE, refused).await;
    let answer = answer.context("no answer to 3 GiB")??;
    shown.bar(Bar::new(
        "a tensor of 3 GiB",
        "400",
        answer.status.to_string(),
        answer.status == 400,
    ));
    shown.client("an HTTP client afterwards", &before, guest.usual().await?);
    shown.counted(&victim, "body_size", 1).await?;
    Ok(shown)
}

/// What came back.
#[derive(Debug)]
struct Answer {
    status: u16,
    is_equal: bool,
}

impl Answer {
    fn describe(&self) -> String {
        let equal = if self.is_equal { "equal" } else { "different" };
        format!("{}, {equal}", self.status)
    }
}

/// Numbers that differ from each other, none of them special.
fn block() -> Vec<u8> {
    let numbers = (0..BLOCK / 4).map(|index| index as f32 * 0.5);
    numbers.flat_map(f32::to_le_bytes).collect()
}

/// Has `bytes` of the block, again and again, sent through a model that changes nothing.
async fn exchange(address: &str, block: &[u8], bytes: u64) -> Result<Answer> {
    let json = format!(
        "{{\"inputs\":[{{\"name\":\"INPUT\",\"datatype\":\"FP32\",\"shape\":[1,{}],\
         \"parameters\":{{\"binary_data_size\":{bytes}}}}}],\
         \"parameters\":{{\"binary_data_output\":true}}}}",
        bytes / 4
    );
    let head = format!(
        "POST /v2/models/identity_fp32/infer HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         Inference-Header-Content-Length: {}\r\nContent-Length: {}\r\n\r\n{json}",
        json.len(),
        json.len() as u64 + bytes
    );
    let mut socket = TcpStream::connect(address).await?;
    let (reader, mut writer) = socket.split();
    let sending = async {
        // The server may refuse before everything is sent.
        if writer.write_all(head.as_bytes()).await.is_err() {
            return;
        }
        let mut left = bytes;
        while left > 0 {
            let length = left.min(block.len() as u64);
            if writer.write_all(&block[..length as usize]).await.is_err() {
                return;
            }
            left -= length;
        }
    };
    let reading = read(BufReader::new(reader), block, bytes);
    let ((), answer) = tokio::join!(sending, reading);
    answer
}

async fn read(
    mut reader: BufReader<tokio::net::tcp::ReadHalf<'_>>,
    block: &[u8],
    bytes: u64,
) -> Result<Answer> {
    let mut json_length = 0;
    let mut line = String::new();
    reader.read_line(&mut line).await?;
    let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.with_context(|| format!("no answer but {line:?}"))?;
    loop {
        line.clear();
        ensure!(reader.read_line(&mut line).await? > 0, "no end of headers");
        let header = line.trim_end().to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("inference-header-content-length: ") {
            json_length = value.parse()?;
        }
    }
    let mut answer = Answer {
        status,
        is_equal: false,
    };
    if status != 200 {
        return Ok(answer);
    }
    let mut json = vec![0; json_length];
    reader.read_exact(&mut json).await?;
    let mut back = vec![0; block.len()];
    let mut left = bytes;
    while left > 0 {
        let length = left.min(block.len() as u64) as usize;
        reader.read_exact(&mut back[..length]).await?;
        if back[..length] != block[..length] {
            return Ok(answer);
        }
        left -= length as u64;
    }
    answer.is_equal = true;
    Ok(answer)
}

fn available_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.context("no MemAvailable")? << 10)
}
