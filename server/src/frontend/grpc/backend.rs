//! What the gRPC front end needs of the server: a seam for tests, nothing more.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use dormouse_core::time::Timestamp;

use crate::activity::Hold;
use crate::error::ServeError;
use crate::extensions::Extensions;
use crate::host::{InFlight, InFlightBytes};
use crate::request::{InferResponse, RawRequest};
use crate::service::{IndexEntry, LoadOverrides, ModelDescription, ServerInfo, Service};
use crate::spans::Tracer;
use crate::stats::VersionStatistics;

/// See the methods of the same names on [`Service`].
pub(crate) trait Backend: Clone + fmt::Debug + Send + Sync + 'static {
    fn now(&self) -> Timestamp;
    /// Keeps the server from calling itself idle.
    fn hold(&self) -> Option<Hold>;
    /// None when nothing is recorded.
    fn tracer(&self) -> Option<&Tracer> {
        None
    }
    /// What messages count against while they arrive.
    fn in_flight(&self) -> Option<&Arc<InFlight>> {
        None
    }
    /// Counts a message that has come until it is queued, where it counts by itself.
    fn count(&self, bytes: usize) -> Result<Option<InFlightBytes>, ServeError> {
        match self.in_flight() {
            Some(in_flight) => in_flight.reserve_arrived(bytes),
            None => Ok(None),
        }
    }
    fn info(&self) -> ServerInfo;
    fn extensions(&self) -> &Extensions;
    /// Fails for a model that is in no repository; "" stands for all of them.
    fn check_known(&self, model: &str) -> Result<(), ServeError>;
    fn is_live(&self) -> bool;
    fn is_ready(&self) -> bool;
    fn readiness_changed(&self, known: bool) -> impl Future<Output = bool> + Send;
    fn is_model_ready(
        &self,
        name: &str,
        version: &str,
    ) -> impl Future<Output = Result<bool, ServeError>> + Send;
    fn describe(
        &self,
        name: &str,
        version: &str,
    ) -> impl Future<Output = Result<ModelDescription, ServeError>> + Send;
    fn infer(
        &self,
        name: &str,
        version: &str,
        request: RawRequest,
    ) -> impl Future<Output = Result<InferResponse, ServeError>> + Send;
    fn statistics(
        &self,
        name: &str,
        version: &str,
    ) -> impl Future<Output = Result<Vec<VersionStatistics>, ServeError>> + Send;
    fn index(&self, ready_only: bool) -> Vec<IndexEntry>;
    fn load(
        &self,
        name: &str,
        overrides: LoadOverrides,
    ) -> impl Future<Output = Result<(), ServeError>> + Send;
    fn unload(&self, name: &str) -> impl Future<Output = Result<(), ServeError>> + Send;
}

impl Backend for Service {
    fn now(&self) -> Timestamp {
        Service::now(self)
    }

    fn hold(&self) -> Option<Hold> {
        Some(self.host().activity.hold())
    }

    fn tracer(&self) -> Option<&Tracer> {
        self.host().tracer.as_ref()
    }

    fn in_flight(&self) -> Option<&Arc<InFlight>> {
        Some(&self.host().in_flight)
    }

    fn info(&self) -> ServerInfo {
        Service::info(self)
    }

    fn extensions(&self) -> &Extensions {
        Service::extensions(self)
    }

    fn check_known(&self, model: &str) -> Result<(), ServeError> {
        Service::check_known(self, model)
    }

    fn is_live(&self) -> bool {
        Service::is_live(self)
    }

    fn is_ready(&self) -> bool {
        Service::is_ready(self)
    }

    fn readiness_changed(&self, known: bool) -> impl Future<Output = bool> + Send {
        Service::readiness_changed(self, known)
    }

    fn is_model_ready(
        &self,
        name: &str,
        version: &str,
    ) -> impl Future<Output = Result<bool, ServeError>> + Send {
        Service::is_model_ready(self, name, version)
    }

    fn describe(
        &self,
        name: &str,
        version: &str,
    ) -> impl Future<Output = Result<ModelDescription, ServeError>> + Send {
        Service::describe(self, name, version)
    }

    fn infer(
        &self,
        name: &str,
        version: &str,
        request: RawRequest,
    ) -> impl Future<Output = Result<InferResponse, ServeError>> + Send {
        Service::infer(self, name, version, request)
    }

    fn statistics(
        &self,
        name: &str,
        version: &str,
    ) -> impl Future<Output = Result<Vec<VersionStatistics>, ServeError>> + Send {
        Service::statistics(self, name, version)
    }

    fn index(&self, ready_only: bool) -> Vec<IndexEntry> {
        Service::index(self, ready_only)
    }

    fn load(
        &self,
        name: &str,
        overrides: LoadOverrides,
    ) -> impl Future<Output = Result<(), ServeError>> + Send {
        Service::load(self, name, overrides)
    }

    fn unload(&self, name: &str) -> impl Future<Output = Result<(), ServeError>> + Send {
        Service::unload(self, name)
    }
}
