//! What a webhook says: a CloudEvents document, signed together with the time it was sent at.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderValue, Method, Request, header};
use http_body_util::Full;
use serde_json::{Value, json};
use sha2::Sha256;

use crate::config::{Endpoint, Secret};
use crate::events::{Event, EventKind};

/// Who sends: the server's name, and a word that no other process has.
#[derive(Clone, Debug)]
pub(super) struct Sender {
    pub(super) server: String,
    instance: u64,
}

impl Sender {
    pub(super) fn new(server: String) -> Self {
        Self {
            server,
            instance: RandomState::new().hash_one(std::process::id()),
        }
    }
}

/// A message on its way; its id and body stay the same over all attempts.
#[derive(Clone, Debug)]
pub(super) struct Message {
    pub(super) id: String,
    pub(super) kind: &'static str,
    pub(super) body: Bytes,
}

impl Message {
    pub(super) fn new(sender: &Sender, event: &Event) -> Self {
        let id = format!("{:016x}-{}", sender.instance, event.sequence);
        let kind = event.kind.name();
        let mut data = data(&event.kind);
        let mut document = json!({
            "specversion": "1.0",
            "id": id,
            "source": format!("dormouse/{}", sender.server),
            "time": humantime::format_rfc3339_millis(event.at).to_string(),
            "datacontenttype": "application/json",
        });
        match &event.model {
            Some(model) => {
                document["type"] = format!("dormouse.model.{kind}").into();
                document["subject"] = format!("{}/{}", model.name, model.version).into();
                data["model"] = (*model.name).into();
                data["version"] = model.version.0.into();
            }
            None => document["type"] = format!("dormouse.server.{kind}").into(),
        }
        document["data"] = data;
        Self {
            id,
            kind,
            body: document.to_string().into(),
        }
    }

    /// The request of one attempt, made `timestamp` seconds after the epoch.
    pub(super) fn request(
        &self,
        endpoint: &Endpoint,
        secret: Option<&Secret>,
        timestamp: u64,
    ) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(self.body.clone()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = endpoint.path.clone().into();
        let mut set = |name: header::HeaderName, value: &str| {
            // Hosts come from an address that was parsed; the rest is ours.
            let value = HeaderValue::from_str(value).expect("plain ASCII");
            request.headers_mut().insert(name, value);
        };
        let is_default = endpoint.port == if endpoint.is_https { 443 } else { 80 };
        match is_default {
            true => set(header::HOST, &endpoint.host),
            false => set(
                header::HOST,
                &format!("{}:{}", endpoint.host, endpoint.port),
            ),
        }
        set(header::CONTENT_TYPE, "application/cloudevents+json");
        set(
            header::USER_AGENT,
            concat!("dormouse/", env!("CARGO_PKG_VERSION")),
        );
        set(header::CONNECTION, "close");
        set(DELIVERY, &self.id);
        set(TIMESTAMP, &timestamp.to_string());
        if let Some(secret) = secret {
            set(SIGNATURE, &signature(secret, timestamp, &self.body));
        }
        request
    }
}

const DELIVERY: header::HeaderName = header::HeaderName::from_static("x-dormouse-delivery");
const TIMESTAMP: header::HeaderName = header::HeaderName::from_static("x-dormouse-timestamp");
const SIGNATURE: header::HeaderName = header::HeaderName::from_static("x-dormouse-signature");

/// `sha256=` and the HMAC of `<timestamp>.<body>`, in hexadecimal.
fn signature(secret: &Secret, timestamp: u64, body: &[u8]) -> String {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(secret.expose())
        .expect("HMAC takes keys of every length");
    mac.update(timestamp.to_string().as_bytes());
    mac.update(b".");
    mac.update(body);
    let code = mac.finalize().into_bytes();
    let mut text = String::with_capacity(7 + 2 * code.len());
    text.push_str("sha256=");
    for byte in code {
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

fn data(kind: &EventKind) -> Value {
    match kind {
        EventKind::Woke { took, bytes } => {
            json!({ "took_seconds": took.as_secs_f64(), "bytes": bytes })
        }
        EventKind::Parked { returned_bytes } | EventKind::Slept { returned_bytes } => {
            json!({ "returned_bytes": returned_bytes })
        }
        EventKind::Failed { error, retry_in } => {
            // Never, of a model that is quarantined.
            let seconds = (*retry_in != Duration::MAX).then_some(retry_in.as_secs_f64());
            json!({ "error": error, "retry_in_seconds": seconds })
        }
        EventKind::Idle { idle_for } => json!({ "idle_seconds": idle_for.as_secs_f64() }),
        EventKind::Active => json!({}),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use dormouse_core::id::ModelId;

    use super::*;

    #[test]
    fn a_message_is_a_cloud_event() {
        let sender = Sender::new("mouse-1".to_owned());
        let event = Event {
            sequence: 7,
            at: SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_123),
            model: Some(ModelId::new("bert", 3)),
            kind: EventKind::Woke {
                took: Duration::from_millis(150),
                bytes: 42,
            },
        };
        let message = Message::new(&sender, &event);
        let body: Value = serde_json::from_slice(&message.body).unwrap();
        assert_eq!(body["specversion"], "1.0");
        assert_eq!(body["id"], message.id.as_str());
        assert_eq!(body["type"], "dormouse.model.woke");
        assert_eq!(body["source"], "dormouse/mouse-1");
        assert_eq!(body["subject"], "bert/3");
        assert_eq!(body["time"], "2023-11-14T22:13:20.123Z");
        let expected = json!({"model": "bert", "version": 3, "took_seconds": 0.15, "bytes": 42});
        assert_eq!(body["data"], expected);
        // The same event told twice is the same message; another process' is not.
        assert_eq!(Message::new(&sender, &event).id, message.id);
        assert_ne!(
            Message::new(&Sender::new(String::new()), &event).id,
            message.id
        );
    }

    #[test]
    fn the_signature_is_an_hmac_over_time_and_body() {
        let secret = Secret::new(*b"Jefe");
        // `printf '17.body' | openssl dgst -sha256 -hmac Jefe`
        assert_eq!(
            signature(&secret, 17, b"body"),
            "sha256=8aaa989c6dda3dae11734f9b2c3d5c4ba297a7205a3ba8be6ebf3c61f2306fc8"
        );
    }
}
