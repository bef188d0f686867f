//! Requests that ask for more than tensors in messages, or that are traced.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use dormouse_core::id::ByteSize;
use dormouse_core::shape::DisplayShape;
use dormouse_model_store::spec::ModelSpec;

use super::Service;
use crate::classification::{self, classify};
use crate::error::ServeError;
use crate::request::{InferResponse, OutputWish, RawRequest, Wishes};
use crate::shared_memory::{RegionSlice, Regions, ResolvedSlice};
use crate::trace_settings::Level;

/// Shared memory up to this size is copied, and outputs are classified, where the request is read.
const INLINE: u64 = 256 << 10;

/// Tensors of one request that are in shared memory or to be classified.
const MAX_WISHES: usize = 4096;

type Answering<'a> = Pin<Box<dyn Future<Output = Result<InferResponse, ServeError>> + Send + 'a>>;

/// An output's wish with everything looked up.
enum Prepared {
    Classes(u64),
    Region(ResolvedSlice),
}

impl Service {
    /// As [`Service::infer`]; on the heap, so that the plain requests' futures stay small.
    pub(super) fn infer_extended<'a>(
        &'a self,
        name: &'a str,
        version: &'a str,
        request: RawRequest,
    ) -> Answering<'a> {
        Box::pin(async move {
            let trace = &self.shared.extensions.trace;
            let level = trace.is_on().then(|| trace.sample(name)).flatten();
            let Some(level) = level else {
                return self.infer_wishes(name, version, request).await;
            };
            let traced = Traced::begin(level, &request);
            let received = request.received;
            let answer = self.infer_wishes(name, version, request).await;
            traced.end(name, version, self.now() - received, &answer);
            answer
        })
    }

    async fn infer_wishes(
        &self,
        name: &str,
        version: &str,
        mut request: RawRequest,
    ) -> Result<InferResponse, ServeError> {
        let Some(wishes) = request.wishes.take() else {
            return self.infer_plain(name, version, request).await;
        };
        let Wishes {
            inputs,
            outputs,
            caller,
        } = *wishes;
        let regions = self.shared.extensions.shared_memory.of(caller.as_ref());
        if inputs.len().saturating_add(outputs.len()) > MAX_WISHES {
            return Err(ServeError::invalid(format!(
                "more than {MAX_WISHES} tensors of the request are in shared memory or to be classified"
            )));
        }
        let outputs = prepare(regions, outputs)?;
        let is_classified = |(_, wish): &(_, Prepared)| matches!(wish, Prepared::Classes(_));
        let spec = match outputs.iter().any(is_classified) {
            true => {
                let spec = self.classified(name, version, &outputs);
                Some(self.in_time(name, request.deadline, spec).await?)
            }
            false => None,
        };
        self.read_inputs(&mut request, regions, inputs).await?;
        let mut response = self.infer_plain(name, version, request).await?;
        if !outputs.is_empty() {
            finish(&mut response, outputs, spec.as_ref()).await?;
        }
        Ok(response)
    }

    /// What the model is whose outputs are to be classified. Refuses those that have no order,
    /// before it is woken.
    async fn classified(
        &self,
        name: &str,
        version: &str,
        outputs: &[(String, Prepared)],
    ) -> Result<Arc<ModelSpec>, ServeError> {
        let described = self.describe(name, version).await?;
        for (output, wish) in outputs {
            let mut specs = described.spec.outputs.iter();
            let spec = specs.find(|spec| *spec.name == **output);
            if let (Prepared::Classes(_), Some(spec)) = (wish, spec) {
                classification::check_datatype(output, spec.datatype)?;
            }
        }
        Ok(described.spec)
    }

    /// Copies inputs out of shared memory. What they take counts as in flight before it is
    /// allocated, and from then on as part of the request.
    async fn read_inputs(
        &self,
        request: &mut RawRequest,
        regions: Regions<'_>,
        inputs: Vec<(usize, RegionSlice)>,
    ) -> Result<(), ServeError> {
        if inputs.is_empty() {
            return Ok(());
        }
        let slices = inputs
            .iter()
            .map(|(_, slice)| regions.resolve(slice))
            .collect::<Result<Vec<_>, _>>()?;
        let sizes = inputs.iter().map(|(_, slice)| slice.byte_size);
        let total = sizes.fold(0, u64::saturating_add);
        let reserved = self.shared.host.in_flight.reserve(total)?;
        let read = move || {
            let slices = slices.iter();
            let read = slices.map(ResolvedSlice::read);
            let read = read.collect::<Result<Vec<_>, ServeError>>()?;
            // With the bytes: a caller who leaves does not end the copying.
            Ok((read, reserved))
        };
        let (read, reserved) = if total <= INLINE {
            read()?
        } else {
            blocking(read).await?
        };
        for ((index, _), data) in inputs.into_iter().zip(read) {
            if let Some(input) = request.inputs.get_mut(index) {
                input.data = Bytes::from(data);
            }
        }
        request.held = match request.held.take() {
            Some(held) => Some(held.and(reserved)),
            None => Some(reserved),
        };
        Ok(())
    }
}

/// Looks up the regions for outputs: a model is not run for an answer that has no place.
fn prepare(
    regions: Regions<'_>,
    wishes: Vec<(String, OutputWish)>,
) -> Result<Vec<(String, Prepared)>, ServeError> {
    let prepared = wishes.into_iter().map(|(name, wish)| {
        let wish = match wish {
            OutputWish::Classes(count) => Prepared::Classes(count),
            OutputWish::Region(slice) => Prepared::Region(regions.resolve(&slice)?),
        };
        Ok((name, wish))
    });
    prepared.collect()
}

/// Does with the outputs what was asked for.
async fn finish(
    response: &mut InferResponse,
    wishes: Vec<(String, Prepared)>,
    spec: Option<&Arc<ModelSpec>>,
) -> Result<(), ServeError> {
    let has_rows = spec.is_some_and(|spec| spec.max_batch_size > 0);
    let mut writes = Vec::new();
    for (index, (name, tensor)) in response.outputs.iter_mut().enumerate() {
        match wishes.iter().find(|(wanted, _)| **wanted == **name) {
            None => {}
            Some((_, Prepared::Classes(count))) => {
                let (count, name, given) = (*count, Arc::clone(name), tensor.clone());
                let spec = spec.cloned();
                let work = move || {
                    let labels = spec.as_ref().and_then(|spec| spec.labels.get(&name));
                    let labels = labels.map_or(&[][..], |labels| labels);
                    classify(&name, &given, has_rows, (count, labels))
                };
                *tensor = match tensor.data.len() as u64 <= INLINE {
                    true => work()?,
                    false => blocking(work).await?,
                };
            }
            Some((_, Prepared::Region(slice))) => {
                let data = std::mem::take(&mut tensor.data);
                writes.push((index, name.clone(), slice.clone(), data));
            }
        }
    }
    if writes.is_empty() {
        return Ok(());
    }
    let sizes = writes.iter().map(|(.., data)| data.len() as u64);
    let total = sizes.fold(0, u64::saturating_add);
    let count = response.outputs.len();
    let write = move || {
        let mut placed = vec![None; count];
        for (index, name, slice, data) in writes {
            placed[index] = Some(slice.write(&name, &data)?);
        }
        Ok(placed)
    };
    let placed = if total <= INLINE {
        write()?
    } else {
        blocking(write).await?
    };
    response.placed = Some(Box::new(placed));
    Ok(())
}

/// Does something on a thread where it may take its time.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ServeError> + Send + 'static,
) -> Result<T, ServeError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
        Err(ServeError::internal(
            "what was to be done with tensors panicked",
        ))
    })
}

/// A request that is traced: what was told of it before it was moved on.
struct Traced {
    level: Level,
    id: String,
    inputs: String,
}

/// How much of a request's tensors a trace shows.
const MAX_SHOWN: usize = 16;

impl Traced {
    fn begin(level: Level, request: &RawRequest) -> Self {
        let inputs = if level.tensors {
            let shown = request.inputs.iter().take(MAX_SHOWN);
            let shown = shown.map(|input| {
                format!(
                    "{:?} {} {}",
                    input.name,
                    input.datatype,
                    DisplayShape(&input.shape)
                )
            });
            shown.collect::<Vec<_>>().join(", ")
        } else {
            String::new()
        };
        Self {
            level,
            id: request.id.clone(),
            inputs,
        }
    }

    fn end(
        self,
        model: &str,
        version: &str,
        took: std::time::Duration,
        answer: &Result<InferResponse, ServeError>,
    ) {
        let (outcome, version, cold, outputs) = match answer {
            Ok(response) => {
                let outputs = response
                    .outputs
                    .iter()
                    .take(MAX_SHOWN)
                    .map(|(name, tensor)| {
                        let size = ByteSize(tensor.data.len() as u64);
                        format!(
                            "{name:?} {} {} ({size})",
                            tensor.datatype,
                            DisplayShape(&tensor.shape)
                        )
                    });
                (
                    "answered".to_owned(),
                    response.model_version.to_string(),
                    response.cold_start.is_some(),
                    outputs.collect::<Vec<_>>().join(", "),
                )
            }
            Err(error) => (
                error.message().to_owned(),
                version.to_owned(),
                false,
                String::new(),
            ),
        };
        let took_us = self.level.timestamps.then_some(took.as_micros() as u64);
        let (inputs, outputs) = match self.level.tensors {
            true => (Some(self.inputs), Some(outputs)),
            false => (None, None),
        };
        // Debug: what comes from outside is escaped.
        tracing::info!(?model, ?version, id = ?self.id, ?outcome, cold, took_us, inputs, outputs, "trace");
    }
}
