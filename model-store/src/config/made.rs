//! Tensors of the graph that no request gives and no answer holds: the server makes and keeps them.

use std::collections::HashSet;

use dormouse_proto::inference as pb;
use pb::model_config::SchedulingChoice;

/// Their names.
#[derive(Debug, Default)]
pub(super) struct Made<'a> {
    pub(super) inputs: HashSet<&'a str>,
    pub(super) outputs: HashSet<&'a str>,
}

/// What a configuration has the server make.
pub(super) fn made(config: &pb::ModelConfig) -> Made<'_> {
    let mut made = Made::default();
    let targets = config.batch_input.iter().flat_map(|each| &each.target_name);
    made.inputs.extend(targets.map(String::as_str));
    if let Some(SchedulingChoice::SequenceBatching(batching)) = &config.scheduling_choice {
        let controls = batching.control_input.iter().map(|each| each.name.as_str());
        let states = batching.state.iter();
        made.inputs.extend(controls);
        made.inputs
            .extend(states.clone().map(|state| state.input_name.as_str()));
        made.outputs
            .extend(states.map(|state| state.output_name.as_str()));
    }
    made
}
