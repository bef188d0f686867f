//! Walks the messages of an ONNX file. Field numbers are those of `onnx.proto`.

mod tensor;

use std::collections::HashSet;

use dormouse_core::shape::Shape;

use super::elements::element_type;
use super::nodes::{Attribute, Block, Constant, Function, NameId, Names, Node, Nodes, Value};
use super::sites::{InputSite, TensorSite, Walked};
use super::wire::{Field, ReadAt, Span, Wire};
use super::{
    GraphError, MAX_DIMENSIONS, MAX_FILE_BYTES, MAX_FUNCTIONS, MAX_INITIALIZERS, MAX_NESTING,
    MAX_NODES, MAX_OPSETS, MAX_SIGNATURE, MAX_TEXT_BYTES,
};
use crate::graph::{ExternalData, GraphSummary, GraphTensor, GraphType};

/// Whole-number attributes longer than this are not axes or shapes.
const KEPT_INTS: usize = 4_096;

/// Walks a file once.
pub(super) fn read(source: &dyn ReadAt) -> Result<Walked, GraphError> {
    match source.size() {
        0 => return Err(GraphError::Empty),
        bytes if bytes > MAX_FILE_BYTES => return Err(GraphError::FileTooLarge { bytes }),
        _ => {}
    }
    let mut walk = Walk {
        wire: Wire::new(source),
        names: Names::new(),
        external: Vec::new(),
        sites: Vec::new(),
        depth: 0,
        level: 0,
        nodes: 0,
        initializers: 0,
    };
    let model = walk.model()?;
    let (graph_span, graph) = model.graph.ok_or(GraphError::NoGraph)?;
    let given: HashSet<NameId> = graph.block.constants.iter().map(|(id, _)| *id).collect();
    let mut summary = GraphSummary {
        ir_version: model.ir_version,
        opsets: model.opsets,
        outputs: graph.outputs,
        external: walk.external,
        ..GraphSummary::default()
    };
    let mut input_sites = Vec::new();
    for ((id, _), (tensor, field)) in graph.block.inputs.iter().zip(graph.inputs) {
        if given.contains(id) {
            summary.optional_inputs.push(tensor);
        } else {
            summary.inputs.push(tensor);
            input_sites.push(InputSite { name: *id, field });
        }
    }
    let opset = standard_opset(&summary.opsets).unwrap_or(0);
    Ok(Walked {
        summary,
        nodes: Nodes {
            names: walk.names,
            main: graph.block,
            functions: model.functions,
            opset,
            fields: walk.wire.fields(),
        },
        tensors: walk.sites,
        inputs: input_sites,
        graph: graph_span,
        node_count: walk.nodes,
    })
}

fn standard_opset(opsets: &[(String, i64)]) -> Option<i64> {
    let standard = |domain: &str| domain.is_empty() || domain == "ai.onnx";
    let versions = opsets.iter().filter(|(domain, _)| standard(domain));
    versions.map(|(_, version)| *version).max()
}

struct Walk<'a> {
    wire: Wire<'a>,
    names: Names,
    external: Vec<ExternalData>,
    sites: Vec<TensorSite>,
    depth: usize,
    /// 1 in the main graph, more in what lies below it or beside it.
    level: usize,
    nodes: u64,
    initializers: u64,
}

#[derive(Default)]
struct Model {
    ir_version: i64,
    opsets: Vec<(String, i64)>,
    graph: Option<(Span, Graph)>,
    functions: Vec<Function>,
}

#[derive(Default)]
struct Graph {
    block: Block,
    /// With where the file declares them.
    inputs: Vec<(GraphTensor, Span)>,
    outputs: Vec<GraphTensor>,
}

/// What a tensor belongs to.
#[derive(Clone, Copy, PartialEq)]
enum Holder {
    Graph,
    /// An initializer whose zeros are left out.
    Sparse,
    Node,
}

struct Tensor {
    name: NameId,
    constant: Constant,
}

impl Walk<'_> {
    /// Calls `each` for every field of a message.
    fn message(
        &mut self,
        span: Span,
        mut each: impl FnMut(&mut Self, Field) -> Result<(), GraphError>,
    ) -> Result<(), GraphError> {
        if self.depth == MAX_NESTING {
            return Err(GraphError::TooDeep { offset: span.start });
        }
        self.depth += 1;
        self.wire.seek(span.start);
        while let Some(field) = self.wire.field(span.end)? {
            each(self, field)?;
            self.wire.seek(field.end);
        }
        self.depth -= 1;
        Ok(())
    }

    fn model(&mut self) -> Result<Model, GraphError> {
        let mut model = Model::default();
        self.message(self.wire.whole(), |walk, field| {
            match field.number {
                1 => model.ir_version = field.int64()?,
                7 => {
                    let graph = (field.span()?, walk.graph(field.span()?)?);
                    once(&mut model.graph, graph, "the graph", &field)?;
                }
                8 => {
                    let opset = walk.opset(field.span()?)?;
                    push(&mut model.opsets, opset, "operator sets", MAX_OPSETS)?;
                }
                20 => walk.beside(|walk| walk.training(field.span()?))?,
                25 => {
                    let function = walk.beside(|walk| walk.function(field.span()?))?;
                    push(&mut model.functions, function, "functions", MAX_FUNCTIONS)?;
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok(model)
    }

    /// Reads something whose tensors are not those of the main graph.
    fn beside<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, GraphError>,
    ) -> Result<T, GraphError> {
        self.level += 1;
        let result = read(self);
        self.level -= 1;
        result
    }

    fn opset(&mut self, span: Span) -> Result<(String, i64), GraphError> {
        let mut opset = (String::new(), 0);
        self.message(span, |walk, field| {
            match field.number {
                1 => opset.0 = walk.text(&field, "an operator set's domain")?,
                2 => opset.1 = field.int64()?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(opset)
    }

    /// Training graphs never run here, but the engine parses them, so their references count.
    fn training(&mut self, span: Span) -> Result<(), GraphError> {
        let (mut initialization, mut algorithm) = (None, None);
        self.message(span, |walk, field| {
            let (slot, what) = match field.number {
                1 => (&mut initialization, "a training initialization"),
                2 => (&mut algorithm, "a training algorithm"),
                _ => return Ok(()),
            };
            walk.graph(field.span()?)?;
            once(slot, (), what, &field)
        })
    }

    fn function(&mut self, span: Span) -> Result<Function, GraphError> {
        let mut function = Function::default();
        let mut opsets = Vec::new();
        self.message(span, |walk, field| {
            match field.number {
                1 => function.name = walk.name(&field)?,
                4 => {
                    let input = walk.name(&field)?;
                    push(
                        &mut function.inputs,
                        input,
                        "inputs of a function",
                        MAX_SIGNATURE,
                    )?;
                }
                5 => {
                    let output = walk.name(&field)?;
                    push(
                        &mut function.outputs,
                        output,
                        "outputs of a function",
                        MAX_SIGNATURE,
                    )?;
                }
                7 => {
                    let node = walk.node(field.span()?)?;
                    function.nodes.push(node);
                }
                9 => {
                    let opset = walk.opset(field.span()?)?;
                    push(&mut opsets, opset, "operator sets", MAX_OPSETS)?;
                }
                10 => function.domain = walk.name(&field)?,
                11 => drop(walk.attribute(field.span()?)?),
                13 => function.overload = walk.name(&field)?,
                _ => {}
            }
            Ok(())
        })?;
        function.opset = standard_opset(&opsets);
        Ok(function)
    }

    fn graph(&mut self, span: Span) -> Result<Graph, GraphError> {
        self.beside(|walk| walk.graph_fields(span))
    }

    fn graph_fields(&mut self, span: Span) -> Result<Graph, GraphError> {
        let mut graph = Graph::default();
        self.message(span, |walk, field| {
            let block = &mut graph.block;
            match field.number {
                1 => block.nodes.push(walk.node(field.span()?)?),
                5 => {
                    let tensor = walk.tensor(field.span()?, Holder::Graph)?;
                    block.constants.push((tensor.name, tensor.constant));
                    walk.count_initializer()?;
                }
                15 => {
                    let tensor = walk.sparse_tensor(field.span()?, Holder::Sparse)?;
                    block.constants.push((tensor.name, tensor.constant));
                    walk.count_initializer()?;
                }
                11 => {
                    let tensor = walk.value_info(field.span()?)?;
                    let rank = tensor.dims.as_ref().map(|dims| dims.len());
                    block.inputs.push((walk.names.id(&tensor.name), rank));
                    let declared = Span {
                        start: field.at,
                        end: field.end,
                    };
                    push(
                        &mut graph.inputs,
                        (tensor, declared),
                        "inputs of a graph",
                        MAX_SIGNATURE,
                    )?;
                }
                12 => {
                    let tensor = walk.value_info(field.span()?)?;
                    block.outputs.push(walk.names.id(&tensor.name));
                    push(
                        &mut graph.outputs,
                        tensor,
                        "outputs of a graph",
                        MAX_SIGNATURE,
                    )?;
                }
                13 => {
                    let value = walk.value_info(field.span()?)?;
                    if let Some(dims) = value.dims {
                        block.ranks.push((walk.names.id(&value.name), dims.len()));
                    }
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok(graph)
    }

    fn count_initializer(&mut self) -> Result<(), GraphError> {
        self.initializers += 1;
        if self.initializers > MAX_INITIALIZERS {
            return Err(GraphError::TooMany {
                what: "initializers",
                limit: MAX_INITIALIZERS,
            });
        }
        Ok(())
    }

    fn node(&mut self, span: Span) -> Result<Node, GraphError> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(GraphError::TooMany {
                what: "nodes",
                limit: MAX_NODES,
            });
        }
        let mut node = Node::default();
        let before = self.sites.len();
        self.message(span, |walk, field| {
            match field.number {
                1 => {
                    let input = walk.name(&field)?;
                    push(
                        &mut node.inputs,
                        input,
                        "inputs of a node",
                        MAX_FIELDS_OF_A_NODE,
                    )?;
                }
                2 => {
                    let output = walk.name(&field)?;
                    push(
                        &mut node.outputs,
                        output,
                        "outputs of a node",
                        MAX_FIELDS_OF_A_NODE,
                    )?;
                }
                3 => node.name = walk.name(&field)?,
                4 => node.op = walk.name(&field)?,
                5 => {
                    let attribute = walk.attribute(field.span()?)?;
                    push(
                        &mut node.attributes,
                        attribute,
                        "attributes of a node",
                        MAX_FIELDS_OF_A_NODE,
                    )?;
                }
                7 => node.domain = walk.name(&field)?,
                8 => node.overload = walk.name(&field)?,
                _ => {}
            }
            Ok(())
        })?;
        // A constant is known by the value it gives.
        if let Some(&output) = node.outputs.first() {
            let unnamed = self.sites[before..]
                .iter_mut()
                .filter(|site| site.name == 0);
            unnamed.for_each(|site| site.name = output);
        }
        Ok(node)
    }

    fn attribute(&mut self, span: Span) -> Result<Attribute, GraphError> {
        let mut name = 0;
        let mut value = Value::Other;
        let mut ints: Option<Vec<i64>> = None;
        let mut seen: Vec<u32> = Vec::new();
        self.message(span, |walk, field| {
            match field.number {
                1 => name = walk.name(&field)?,
                3 => value = Value::Int(field.int64()?),
                4 => {
                    let text = field.span()?;
                    if text.len() <= MAX_TEXT_BYTES {
                        value = Value::Text(walk.wire.bytes(text, "a string", MAX_TEXT_BYTES)?);
                    }
                }
                5 => {
                    first(&mut seen, &field, "an attribute's tensor")?;
                    value = Value::Tensor(walk.tensor(field.span()?, Holder::Node)?.constant);
                }
                6 => {
                    first(&mut seen, &field, "an attribute's graph")?;
                    value = Value::Block(walk.graph(field.span()?)?.block);
                }
                8 => walk.integers(&field, ints.get_or_insert_default(), KEPT_INTS)?,
                10 => drop(walk.tensor(field.span()?, Holder::Node)?),
                11 => drop(walk.graph(field.span()?)?),
                22 => {
                    first(&mut seen, &field, "an attribute's sparse tensor")?;
                    value =
                        Value::Tensor(walk.sparse_tensor(field.span()?, Holder::Node)?.constant);
                }
                23 => drop(walk.sparse_tensor(field.span()?, Holder::Node)?),
                _ => {}
            }
            Ok(())
        })?;
        if let Some(ints) = ints {
            value = if ints.len() > KEPT_INTS {
                Value::Other
            } else {
                Value::Ints(ints)
            };
        }
        Ok(Attribute { name, value })
    }

    fn value_info(&mut self, span: Span) -> Result<GraphTensor, GraphError> {
        let mut name = String::new();
        let mut kind = None;
        self.message(span, |walk, field| {
            match field.number {
                1 => name = walk.text(&field, "a value's name")?,
                2 => {
                    let found = walk.type_of(field.span()?)?;
                    once(&mut kind, found, "a value's type", &field)?;
                }
                _ => {}
            }
            Ok(())
        })?;
        let (kind, dims) = kind.unwrap_or((GraphType::Other("no type"), None));
        Ok(GraphTensor { name, kind, dims })
    }

    fn type_of(&mut self, span: Span) -> Result<(GraphType, Option<Shape>), GraphError> {
        let mut found = None;
        self.message(span, |walk, field| {
            let kind = match field.number {
                1 => walk.tensor_type(field.span()?)?,
                4 => (GraphType::Other("sequence"), None),
                5 => (GraphType::Other("map"), None),
                7 => (GraphType::Other("opaque"), None),
                8 => (GraphType::Other("sparse tensor"), None),
                9 => (GraphType::Other("optional"), None),
                _ => return Ok(()),
            };
            once(&mut found, kind, "a type", &field)
        })?;
        Ok(found.unwrap_or((GraphType::Other("no type"), None)))
    }

    fn tensor_type(&mut self, span: Span) -> Result<(GraphType, Option<Shape>), GraphError> {
        let mut element = 0;
        let mut dims = None;
        self.message(span, |walk, field| {
            match field.number {
                1 => element = field.int32()?,
                2 => {
                    let shape = walk.shape(field.span()?)?;
                    once(&mut dims, shape, "a shape", &field)?;
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok((element_type(element), dims))
    }

    fn shape(&mut self, span: Span) -> Result<Shape, GraphError> {
        let mut dims = Vec::new();
        self.message(span, |walk, field| {
            if field.number == 1 {
                let dim = walk.dimension(field.span()?)?;
                push(&mut dims, dim, "dimensions of a tensor", MAX_DIMENSIONS)?;
            }
            Ok(())
        })?;
        Ok(dims.into_iter().collect())
    }

    fn dimension(&mut self, span: Span) -> Result<i64, GraphError> {
        let mut dim = -1;
        self.message(span, |_, field| {
            match field.number {
                1 => dim = field.int64()?,
                2 => {
                    field.span()?;
                    dim = -1;
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok(dim.max(-1))
    }

    fn text(&mut self, field: &Field, what: &'static str) -> Result<String, GraphError> {
        let span = field.span()?;
        let bytes = self.wire.bytes(span, what, MAX_TEXT_BYTES)?;
        String::from_utf8(bytes).map_err(|_| GraphError::NotUtf8 {
            what,
            offset: span.start,
        })
    }

    fn name(&mut self, field: &Field) -> Result<NameId, GraphError> {
        let text = self.text(field, "a name")?;
        Ok(self.names.id(&text))
    }
}

/// Tree ensembles aside, nodes have few fields; concatenations of shards have some thousands.
const MAX_FIELDS_OF_A_NODE: u64 = 65_536;

fn once<T>(
    slot: &mut Option<T>,
    value: T,
    what: &'static str,
    field: &Field,
) -> Result<(), GraphError> {
    // Protobuf merges such messages; reading them one by one would see something else.
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(GraphError::Twice {
            what,
            offset: field.at,
        }),
    }
}

fn first(seen: &mut Vec<u32>, field: &Field, what: &'static str) -> Result<(), GraphError> {
    if seen.contains(&field.number) {
        return Err(GraphError::Twice {
            what,
            offset: field.at,
        });
    }
    seen.push(field.number);
    Ok(())
}

fn push<T>(to: &mut Vec<T>, item: T, what: &'static str, limit: u64) -> Result<(), GraphError> {
    if to.len() as u64 == limit {
        return Err(GraphError::TooMany { what, limit });
    }
    to.push(item);
    Ok(())
}
