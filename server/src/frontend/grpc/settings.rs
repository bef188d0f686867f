//! Settings of log and traces.

use std::collections::HashMap;

use dormouse_proto::inference as pb;
use pb::log_settings_request::setting_value::ParameterChoice;
use pb::log_settings_response::SettingValue as LogValue;
use pb::log_settings_response::setting_value::ParameterChoice as LogChoice;
use pb::trace_setting_response::SettingValue as TraceValue;
use tonic::Status;

use super::backend::Backend;
use crate::error::ServeError;
use crate::frontend::status::to_status;
use crate::log_settings::{self, Value};

/// Changes what is given, if anything is, and answers with what holds then.
pub(super) async fn log(
    request: pb::LogSettingsRequest,
) -> Result<pb::LogSettingsResponse, Status> {
    log_settings(request).map_err(|error| to_status(&error))
}

fn log_settings(request: pb::LogSettingsRequest) -> Result<pb::LogSettingsResponse, ServeError> {
    let mut changes = Vec::new();
    for (name, value) in request.settings {
        // As clients send a setting that is to stay as it is.
        let Some(choice) = value.parameter_choice else {
            continue;
        };
        let value = match choice {
            ParameterChoice::BoolParam(flag) => Value::Flag(flag),
            ParameterChoice::Uint32Param(number) => Value::Number(number.into()),
            ParameterChoice::StringParam(text) => Value::Text(text),
        };
        changes.push((name, value));
    }
    if !changes.is_empty() {
        log_settings::update(&changes)?;
    }
    let settings = log_settings::current()?.into_iter().map(|(name, value)| {
        let choice = match value {
            Value::Flag(flag) => LogChoice::BoolParam(flag),
            Value::Number(number) => {
                LogChoice::Uint32Param(u32::try_from(number).unwrap_or(u32::MAX))
            }
            Value::Text(text) => LogChoice::StringParam(text),
        };
        let value = LogValue {
            parameter_choice: Some(choice),
        };
        (name.to_owned(), value)
    });
    Ok(pb::LogSettingsResponse {
        settings: settings.collect(),
    })
}

/// As [`log`], of a model or of all; a setting without values is cleared.
pub(super) async fn trace<B: Backend>(
    backend: &B,
    request: pb::TraceSettingRequest,
) -> Result<pb::TraceSettingResponse, Status> {
    let model = request.model_name;
    let changes: Vec<_> = request
        .settings
        .into_iter()
        .map(|(name, setting)| {
            let value = (!setting.value.is_empty()).then_some(setting.value);
            (name, value)
        })
        .collect();
    let trace = &backend.extensions().trace;
    let known = backend.check_known(&model);
    known.map_err(|error| to_status(&error))?;
    if !changes.is_empty() {
        let changed = trace.update(&model, &changes);
        changed.map_err(|error| to_status(&error))?;
    }
    let settings: HashMap<_, _> = trace
        .current(&model)
        .into_iter()
        .map(|(name, value)| (name.to_owned(), TraceValue { value }))
        .collect();
    Ok(pb::TraceSettingResponse { settings })
}
