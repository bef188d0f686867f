//! In which order a graph's nodes read its weights, so that they can lie and be brought in that
//! way: the first layers run while the last ones' weights are still on their way.

use std::collections::HashMap;

use super::protobuf::{Fields, malformed};
use crate::engine::OptimizedTensor;

/// Smaller tables are brought in as quickly as some of their rows.
const SMALLEST_TABLE: u64 = 8 << 20;

/// Sorts weights by their first use, and returns the names of those of which a run reads some rows
/// only, such as a table of embeddings: they come last. ONNX Runtime writes a graph's nodes in an
/// order they can run in.
pub(super) fn sort(tensors: &mut [OptimizedTensor], model: &[u8]) -> Result<Vec<String>, String> {
    let uses = uses(model)?;
    let of = |tensor: &OptimizedTensor| uses.get(tensor.name.as_bytes());
    let is_table = |tensor: &OptimizedTensor| {
        tensor.len >= SMALLEST_TABLE && of(tensor).is_some_and(|uses| uses.by_rows)
    };
    // What only subgraphs use comes after what the graph does.
    tensors.sort_by_key(|tensor| (is_table(tensor), of(tensor).map_or(usize::MAX, |u| u.first)));
    let tables = tensors.iter().filter(|tensor| is_table(tensor));
    Ok(tables.map(|tensor| tensor.name.clone()).collect())
}

/// Who reads a value.
struct Uses {
    /// The place of the first node that does.
    first: usize,
    /// All of them take rows of it.
    by_rows: bool,
}

/// By name.
fn uses(model: &[u8]) -> Result<HashMap<&[u8], Uses>, String> {
    let mut uses = HashMap::new();
    let mut place = 0;
    for graph in messages(model, 7)? {
        for node in messages(graph, 1)? {
            let takes_rows = takes_rows(node)?;
            for (index, input) in messages(node, 1)?.into_iter().enumerate() {
                let by_rows = takes_rows && index == 0;
                let uses = uses.entry(input).or_insert(Uses {
                    first: place,
                    by_rows,
                });
                uses.by_rows &= by_rows;
            }
            place += 1;
        }
        // What leaves the graph is read as a whole.
        for output in messages(graph, 12)? {
            for name in messages(output, 1)? {
                if let Some(uses) = uses.get_mut(name) {
                    uses.by_rows = false;
                }
            }
        }
    }
    Ok(uses)
}

/// Whether a node is a `Gather` of ONNX's own along the first axis.
fn takes_rows(node: &[u8]) -> Result<bool, String> {
    let standard = |domain: &&[u8]| domain.is_empty() || *domain == b"ai.onnx";
    if messages(node, 4)? != [b"Gather"] || !messages(node, 7)?.iter().all(standard) {
        return Ok(false);
    }
    // Its one attribute is the axis, which is zero unless it says otherwise.
    for attribute in messages(node, 5)? {
        for field in Fields::new(attribute) {
            let field = field?;
            if field.number == 3 && field.varint != Some(0) {
                return Ok(false);
            }
        }
    }
    Ok(true)
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
    use super::super::protobuf::{put_message, put_number};
    use super::*;

    fn gather(data: &str, axis: u64) -> Vec<u8> {
        let mut node = node(&[data, "ids"]);
        put_message(&mut node, 4, b"Gather");
        let mut attribute = Vec::new();
        put_message(&mut attribute, 1, b"axis");
        put_number(&mut attribute, 3, axis);
        put_message(&mut node, 5, &attribute);
        node
    }

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
        sorted_of(names, 4, model).0
    }

    /// The names of tensors of so many bytes in their order, and those of tables.
    fn sorted_of(names: &[&str], len: u64, model: &[u8]) -> (Vec<String>, Vec<String>) {
        let mut tensors: Vec<_> = names
            .iter()
            .map(|name| OptimizedTensor {
                name: (*name).to_owned(),
                element_type: 1,
                dims: vec![1],
                offset: 0,
                len,
            })
            .collect();
        let tables = sort(&mut tensors, model).unwrap();
        let names = tensors.into_iter().map(|tensor| tensor.name).collect();
        (names, tables)
    }

    #[test]
    fn tables_of_which_only_rows_are_read_come_last() {
        let tied = gather("tied", 0);
        let nodes = [
            gather("words", 0),
            gather("places", 0),
            tied,
            gather("columns", 1),
            node(&["x", "tied"]),
            node(&["x", "dense"]),
        ];
        let names = ["dense", "columns", "tied", "places", "words"];
        let (order, tables) = sorted_of(&names, 8 << 20, &model(&nodes));
        assert_eq!(order, ["tied", "columns", "dense", "words", "places"]);
        assert_eq!(tables, ["words", "places"]);
        // Small ones are brought in with the rest.
        let (order, tables) = sorted_of(&names, (8 << 20) - 1, &model(&nodes));
        assert_eq!(order, ["words", "places", "tied", "columns", "dense"]);
        assert!(tables.is_empty());
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
