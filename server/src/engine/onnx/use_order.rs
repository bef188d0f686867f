//! In which order a graph's nodes read its weights, so that they can lie and be brought in that
//! way: the first layers run while the last ones' weights are still on their way.

use std::collections::HashMap;

use super::protobuf::{Fields, malformed};
use crate::engine::OptimizedTensor;

/// Sorts weights by their first use. ONNX Runtime writes a graph's nodes in an order they can run
/// in.
pub(super) fn sort(tensors: &mut [OptimizedTensor], model: &[u8]) -> Result<(), String> {
    let uses = first_uses(model)?;
    // What only subgraphs use comes last.
    tensors.sort_by_key(|tensor| {
        uses.get(tensor.name.as_bytes())
            .copied()
            .unwrap_or(usize::MAX)
    });
    Ok(())
}

/// For each name the place of the first node that reads it.
fn first_uses(model: &[u8]) -> Result<HashMap<&[u8], usize>, String> {
    let mut uses = HashMap::new();
    let mut place = 0;
    for graph in messages(model, 7)? {
        for node in messages(graph, 1)? {
            for input in messages(node, 1)? {
                uses.entry(input).or_insert(place);
            }
            place += 1;
        }
    }
    Ok(uses)
}

/// What is in a field that holds bytes, each time it occurs.
fn messages(bytes: &[u8], number: u32) -> Result<Vec<&[u8]>, String> {
    let mut found = Vec::new();
    for field in Fields::new(bytes) {
        let field = field?;
        if field.number == number {
            let message = field.message;
            found.push(message.ok_or_else(|| malformed("a field has an unknown form"))?);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::protobuf::put_message;
    use super::*;

    fn node(inputs: &[&str]) -> Vec<u8> {
        let mut node = Vec::new();
        for input in inputs {
            put_message(&mut node, 1, input.as_bytes());
        }
        node
    }

    fn model(nodes: &[Vec<u8>]) -> Vec<u8> {
        let mut graph = Vec::new();
        for node in nodes {
            put_message(&mut graph, 1, node);
        }
        let mut model = Vec::new();
        put_message(&mut model, 7, &graph);
        model
    }

    fn sorted(names: &[&str], model: &[u8]) -> Vec<String> {
        let mut tensors: Vec<_> = names
            .iter()
            .map(|name| OptimizedTensor {
                name: (*name).to_owned(),
                element_type: 1,
                dims: vec![1],
                offset: 0,
                len: 4,
            })
            .collect();
        sort(&mut tensors, model).unwrap();
        tensors.into_iter().map(|tensor| tensor.name).collect()
    }

    #[test]
    fn weights_are_sorted_by_the_first_node_that_reads_them() {
        let model = model(&[
            node(&["x", "first"]),
            node(&["y", "second"]),
            node(&["z", "first"]),
            node(&["z", "third"]),
        ]);
        assert_eq!(
            sorted(&["inner", "third", "second", "first"], &model),
            ["first", "second", "third", "inner"]
        );
    }

    #[test]
    fn what_is_no_model_is_refused() {
        let mut tensors = [];
        assert!(sort(&mut tensors, &[0x3a, 0x7f]).is_err());
        assert!(sort(&mut tensors, &[0x38, 0x01]).is_err());
    }
}
