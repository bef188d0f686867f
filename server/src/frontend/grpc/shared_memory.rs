//! The calls that register shared memory.

use dormouse_proto::inference as pb;
use pb::system_shared_memory_status_response::RegionStatus;
use tonic::Status;

use super::backend::Backend;
use crate::frontend::status::to_status;
use crate::shared_memory::{Caller, RegionSlice, Regions, no_cuda, no_cuda_region};

fn regions<'a, B: Backend>(backend: &'a B, caller: Option<&'a Caller>) -> Regions<'a> {
    backend.extensions().shared_memory.of(caller)
}

pub(super) async fn status<B: Backend>(
    backend: &B,
    caller: Option<Caller>,
    request: pb::SystemSharedMemoryStatusRequest,
) -> Result<pb::SystemSharedMemoryStatusResponse, Status> {
    let found = regions(backend, caller.as_ref()).status(&request.name);
    let found = found.map_err(|error| to_status(&error))?;
    let regions = found.into_iter().map(|region| {
        let status = RegionStatus {
            name: region.name.clone(),
            key: region.key,
            offset: region.offset,
            byte_size: region.byte_size,
        };
        (region.name, status)
    });
    Ok(pb::SystemSharedMemoryStatusResponse {
        regions: regions.collect(),
    })
}

pub(super) async fn register<B: Backend>(
    backend: &B,
    caller: Option<Caller>,
    request: pb::SystemSharedMemoryRegisterRequest,
) -> Result<pb::SystemSharedMemoryRegisterResponse, Status> {
    let region = RegionSlice {
        region: request.name,
        offset: request.offset,
        byte_size: request.byte_size,
    };
    match regions(backend, caller.as_ref()).register(&request.key, region) {
        Ok(()) => Ok(pb::SystemSharedMemoryRegisterResponse {}),
        Err(error) => Err(to_status(&error)),
    }
}

pub(super) async fn unregister<B: Backend>(
    backend: &B,
    caller: Option<Caller>,
    request: pb::SystemSharedMemoryUnregisterRequest,
) -> Result<pb::SystemSharedMemoryUnregisterResponse, Status> {
    match regions(backend, caller.as_ref()).unregister(&request.name) {
        Ok(()) => Ok(pb::SystemSharedMemoryUnregisterResponse {}),
        Err(error) => Err(to_status(&error)),
    }
}

/// As Triton without a GPU: there are no regions, which is no error.
pub(super) async fn cuda_status(
    request: pb::CudaSharedMemoryStatusRequest,
) -> Result<pb::CudaSharedMemoryStatusResponse, Status> {
    match request.name.as_str() {
        "" => Ok(pb::CudaSharedMemoryStatusResponse::default()),
        name => Err(to_status(&no_cuda_region(name))),
    }
}

pub(super) async fn cuda_register(
    request: pb::CudaSharedMemoryRegisterRequest,
) -> Result<pb::CudaSharedMemoryRegisterResponse, Status> {
    Err(to_status(&no_cuda(&request.name)))
}

/// Clients forget every region before they begin, also on servers without a GPU.
pub(super) async fn cuda_unregister(
    _: pb::CudaSharedMemoryUnregisterRequest,
) -> Result<pb::CudaSharedMemoryUnregisterResponse, Status> {
    Ok(pb::CudaSharedMemoryUnregisterResponse {})
}
