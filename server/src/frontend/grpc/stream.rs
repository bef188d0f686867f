//! `ModelStreamInfer`: many requests on one call, answered in the order they came.

mod ordered;

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use dormouse_proto::inference as pb;
use futures_util::stream::{BoxStream, Stream, StreamExt};
use http::HeaderMap;
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use self::ordered::{Job, Weigh, ordered};
use super::answer::{Answer, StreamAnswer};
use super::backend::Backend;
use super::codec::{self, Received};
use super::deadline::CallTime;
use super::infer::{log_internal, read_request};
use crate::error::ServeError;
use crate::frontend::status::to_status;
use crate::guard::{Refusal, StreamPermit, StreamQuota};
use crate::host::InFlightBytes;
use crate::limits::RequestLimits;
use crate::request::Turn;
use crate::shared_memory::Caller;
use crate::spans::Protocol;

/// What holds for every request of a stream.
#[derive(Clone, Debug)]
pub(super) struct StreamTerms {
    /// When the call itself was received and until when it may last.
    pub(super) time: CallTime,
    /// End the stream with the status of the first error, instead of sending errors as messages.
    pub(super) fail_fast: bool,
    /// How many requests may be under way; further ones are not read. Steps of sequences that
    /// wait for others are not counted, up to a second bound.
    pub(super) in_flight: usize,
    /// The call's headers, when its requests may be recorded.
    pub(super) caller: Option<HeaderMap>,
    /// What each request counts against.
    pub(super) quota: Option<StreamQuota>,
    /// Whose regions of shared memory requests may name, where that is known.
    pub(super) regions_of: Option<Caller>,
    /// What each request may consist of.
    pub(super) limits: RequestLimits,
}

/// Whether the client wants errors as statuses.
pub(super) fn wants_status(headers: &HeaderMap) -> bool {
    headers
        .get("triton_grpc_error")
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"true"))
}

/// Answers `requests` in order. The client's half-close ends the stream after the last answer;
/// dropping the stream cancels every request that has no answer yet. Once `shutdown` is
/// cancelled nothing more is read, what was read is answered, and the stream ends as unavailable.
pub(super) fn answers<B, R>(
    backend: B,
    requests: R,
    terms: StreamTerms,
    shutdown: CancellationToken,
) -> BoxStream<'static, Result<StreamAnswer, Status>>
where
    B: Backend,
    R: Stream<Item = Result<Received<pb::ModelInferRequest>, Status>> + Send + 'static,
{
    let stopped = shutdown.clone();
    // An endless source after the signal would keep the stream open: one last error ends it.
    let farewell = futures_util::stream::once(async move {
        stopped
            .is_cancelled()
            .then(|| Status::unavailable("the server is shutting down: open a new stream"))
    })
    .filter_map(|status| std::future::ready(status.map(Err)));
    let in_flight = terms.in_flight;
    let mut last_turn = None;
    let jobs = requests
        .take_until(shutdown.cancelled_owned())
        .chain(farewell)
        .map(move |request| {
            let arrived = request.map(|received| Arrived {
                // From here on: many may be read before the first of them is worked on.
                quota: (terms.quota.as_ref())
                    .map(|quota| quota.enter(received.bytes))
                    .transpose(),
                held: backend.count(received.bytes),
                request: received.message,
            });
            let in_sequence = arrived
                .as_ref()
                .is_ok_and(|arrived| arrived.request.parameters.contains_key("sequence_id"));
            let turn = in_sequence.then(|| Turn::after(&mut last_turn));
            Job {
                work: answer(backend.clone(), arrived, (terms.clone(), turn)),
                is_step: in_sequence,
            }
        });
    ordered(jobs, in_flight).boxed()
}

impl Weigh for Result<StreamAnswer, Status> {
    fn bytes(&self) -> u64 {
        let Ok(StreamAnswer::Answer(Answer(response))) = self else {
            return 0;
        };
        let sizes = response.outputs.iter();
        let sizes = sizes.map(|(_, tensor)| tensor.data.len() as u64);
        sizes.fold(0, u64::saturating_add)
    }
}

/// A request that was read, with what it counts against.
struct Arrived {
    request: pb::ModelInferRequest,
    /// Its client's quota, if there is one.
    quota: Result<Option<StreamPermit>, Refusal>,
    /// What all requests may hold; nothing of a small one counts before it is queued.
    held: Result<Option<InFlightBytes>, ServeError>,
}

async fn answer<B: Backend>(
    backend: B,
    arrived: Result<Arrived, Status>,
    (terms, turn): (StreamTerms, Option<Turn>),
) -> Result<StreamAnswer, Status> {
    let arrived = arrived.inspect_err(|status| {
        codec::note_refusal(status.code(), status.message().as_bytes());
    })?;
    let mut request = arrived.request;
    let time = CallTime {
        received: backend.now(),
        ..terms.time
    };
    let model_name = std::mem::take(&mut request.model_name);
    let model_version = std::mem::take(&mut request.model_version);
    let id = request.id.clone();
    let _counted = match arrived.quota {
        Ok(counted) => counted,
        Err(refusal) if terms.fail_fast => return Err(refusal.status()),
        Err(refusal) => {
            return Ok(StreamAnswer::Failure {
                message: refusal.message().to_owned(),
                id,
                model_name,
                model_version,
            });
        }
    };
    let span = backend.tracer().zip(terms.caller.as_ref());
    let span =
        span.and_then(|(tracer, headers)| tracer.request(headers, time.received, Protocol::Grpc));
    if let Some(span) = &span {
        span.asks(&model_name, &model_version, &id);
    }
    let read = arrived.held.and_then(|held| {
        let mut raw = read_request(&model_name, time, request, &terms.limits)?;
        raw.held = held;
        Ok(raw)
    });
    let outcome = match read {
        Ok(mut raw) => {
            match &mut raw.sequence {
                Some(sequence) => sequence.turn = turn,
                // Whatever comes of it, the next one need not wait for it.
                None => drop(turn),
            }
            raw.span = span.clone();
            if let Some(wishes) = &mut raw.wishes {
                wishes.caller = terms.regions_of;
            }
            backend.infer(&model_name, &model_version, raw).await
        }
        Err(error) => Err(error),
    };
    if let Some(span) = span {
        span.ended(outcome.as_ref().err());
    }
    let error: ServeError = match outcome {
        Ok(response) => return Ok(StreamAnswer::Answer(Answer(response))),
        Err(error) => error,
    };
    log_internal(&model_name, &error);
    if terms.fail_fast {
        return Err(to_status(&error));
    }
    Ok(StreamAnswer::Failure {
        message: error.message().to_owned(),
        id,
        model_name,
        model_version,
    })
}

/// Ends a stream as overdue once the time that its client gave the call is over.
pub(super) struct Limited<S> {
    stream: S,
    overdue: Option<Pin<Box<Sleep>>>,
}

impl<S> Limited<S> {
    pub(super) fn new(stream: S, timeout: Option<Duration>) -> Self {
        Self {
            stream,
            overdue: timeout.map(|timeout| Box::pin(tokio::time::sleep(timeout))),
        }
    }
}

impl<S, T> Stream for Limited<S>
where
    S: Stream<Item = Result<T, Status>> + Unpin,
{
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if let ready @ Poll::Ready(_) = this.stream.poll_next_unpin(cx) {
            return ready;
        }
        let Some(overdue) = &mut this.overdue else {
            return Poll::Pending;
        };
        match overdue.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => {
                this.overdue = None;
                Poll::Ready(Some(Err(super::overdue())))
            }
        }
    }
}

#[cfg(test)]
mod tests;
