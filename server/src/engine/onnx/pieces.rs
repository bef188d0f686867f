//! What is read of a model's file on the way to ONNX Runtime, for `fuzz`.

use super::graph_inputs;
use super::model_proto::{Place, Rewrite, TensorHead, rewrite};

/// The names of a model's inputs, those with an initializer included.
pub(crate) fn input_names(model: &[u8]) -> Result<Vec<String>, String> {
    graph_inputs::input_names(model)
}

/// The files that a model's tensors are in.
pub(crate) fn locations(model: &[u8]) -> Result<Vec<String>, String> {
    struct Locations(Vec<String>);

    impl Rewrite for Locations {
        fn tensor(&mut self, _: Place, bytes: &[u8]) -> Result<Option<Vec<u8>>, String> {
            let head = TensorHead::read(bytes)?;
            self.0.extend(head.location.filter(|_| head.external));
            Ok(None)
        }
    }

    let mut locations = Locations(Vec::new());
    rewrite(model, &mut locations)?;
    Ok(locations.0)
}
