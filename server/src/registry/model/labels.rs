//! The label files that a model's configuration names.

use dormouse_model_store::repository::ModelDir;
use dormouse_model_store::spec::OutputLabels;
use dormouse_proto::inference as pb;

use crate::classification::read_labels;
use crate::error::ServeError;

/// A label file larger than this is a mistake.
const MAX_LABELS: u64 = 16 << 20;

/// Reads the labels of every output that has a `label_filename`.
pub(super) fn read(dir: &ModelDir, config: &pb::ModelConfig) -> Result<OutputLabels, ServeError> {
    let mut labels = OutputLabels::new();
    for output in &config.output {
        if output.label_filename.is_empty() {
            continue;
        }
        let broken = |cause: &dyn std::fmt::Display| {
            ServeError::unavailable(format!(
                "model '{}' cannot be served: the labels of output '{}' cannot be read: {cause}",
                dir.name(),
                output.name
            ))
        };
        let file = dir.read_file(&output.label_filename, MAX_LABELS);
        let file = file.map_err(|error| broken(&error))?;
        let text = String::from_utf8(file).map_err(|error| broken(&error.utf8_error()))?;
        labels.insert(output.name.as_str().into(), read_labels(&text).into());
    }
    Ok(labels)
}
