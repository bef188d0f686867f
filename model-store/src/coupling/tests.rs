use crate::onnx::writer::*;
use crate::onnx::{ReadAt, summarize};

/// A graph over `x [N,4,8]`, `ids [N,8]` and weights, one node per line.
struct Graph {
    opset: i64,
    message: Message,
}

fn graph() -> Graph {
    let message = Message::new()
        .message(11, value("x", FLOAT, &[-1, 4, 8]))
        .message(11, value("ids", INT64, &[-1, 8]))
        .message(11, value("v", FLOAT, &[-1]))
        .message(5, tensor("W", FLOAT, &[8, 8]))
        .message(5, tensor("B", FLOAT, &[8]))
        .message(5, ints("zero", &[], &[0]))
        .message(5, ints("zeros", &[1], &[0]))
        .message(5, ints("ones", &[1], &[1]))
        .message(5, ints("last", &[1], &[-1]))
        .message(5, ints("end", &[1], &[i64::MAX]));
    Graph { opset: 17, message }
}

impl Graph {
    fn opset(self, opset: i64) -> Self {
        Self { opset, ..self }
    }

    fn with(self, field: u32, message: Message) -> Self {
        Self {
            message: self.message.message(field, message),
            ..self
        }
    }

    fn node(self, line: &str, attributes: Vec<Message>) -> Self {
        self.with(1, node(line, attributes))
    }

    fn findings(self) -> Vec<String> {
        let model = model_of(self.opset, self.message).0;
        let source: &dyn ReadAt = &model.as_slice();
        summarize(source).unwrap().batch_coupling
    }

    #[track_caller]
    fn independent(self) {
        assert_eq!(self.findings(), [""; 0]);
    }

    #[track_caller]
    fn coupled(self, how: &str) {
        let findings = self.findings();
        assert!(
            findings
                .first()
                .is_some_and(|finding| finding.contains(how)),
            "{how}: {findings:?}"
        );
    }
}

#[test]
fn dynamic_quantization_couples_rows() {
    graph()
        .node("q,s,z = DynamicQuantizeLinear(x)", vec![])
        .node("y = com.microsoft:MatMulIntegerToFloat(q,W,s,s,z)", vec![])
        .coupled("node 'the DynamicQuantizeLinear' (DynamicQuantizeLinear) takes one scale");
    for op in ["DynamicQuantizeMatMul", "DynamicQuantizeLSTM"] {
        graph()
            .node(&format!("y = com.microsoft:{op}(x,W)"), vec![])
            .coupled("takes one scale");
    }
    graph()
        .node("q,s,z = DynamicQuantizeLinear(W)", vec![])
        .node("y = Add(x,s)", vec![])
        .independent();
}

#[test]
fn reductions_couple_rows_only_over_the_batch() {
    graph()
        .node("y = ReduceMean(x)", vec![])
        .coupled("reduces over all axes");
    graph()
        .node("y = ReduceMean(x)", vec![list("axes", &[-1])])
        .independent();
    graph()
        .node("y = ReduceMean(x)", vec![list("axes", &[0])])
        .coupled("reduces over axis 0");
    graph()
        .node("y = ReduceMean(x)", vec![list("axes", &[-3])])
        .coupled("reduces over axis 0");
    graph().node("y = ReduceSum(x,last)", vec![]).independent();
    graph()
        .node("y = ReduceSum(x,zeros)", vec![])
        .coupled("axis 0");
    graph()
        .node("y = ReduceSum(x)", vec![int("noop_with_empty_axes", 1)])
        .independent();
    graph()
        .node("y = ReduceMax(W)", vec![])
        .node("z = Add(x,y)", vec![])
        .independent();
    graph().node("y = ArgMax(x)", vec![]).coupled("axis 0");
    graph()
        .node("y = ArgMax(x)", vec![int("axis", -1)])
        .independent();
    graph()
        .node("y = ReduceSum(v,last)", vec![])
        .coupled("axis 0");
    graph()
        .node(
            "a = ReduceMean(x)",
            vec![list("axes", &[1]), int("keepdims", 0)],
        )
        .node("b = ReduceMean(a)", vec![list("axes", &[-1])])
        .independent();
    graph()
        .node(
            "a = ReduceMean(x)",
            vec![list("axes", &[1]), int("keepdims", 0)],
        )
        .node("b = ReduceMean(a)", vec![list("axes", &[-2])])
        .coupled("axis 0");
}

#[test]
fn axes_counted_out_from_the_rank_are_followed() {
    let reduced_from = |first: &str| {
        graph()
            .node("shape = Shape(x)", vec![])
            .node("rank = Size(shape)", vec![])
            .node("one = Constant()", vec![int("value_int", 1)])
            .node(&format!("axes = Range({first},rank,one)"), vec![])
            .node("y = ReduceSum(x,axes)", vec![])
    };
    reduced_from("zero").coupled("reduces over axis 0");
    reduced_from("one").independent();
}

#[test]
fn the_batch_is_followed_through_transposes() {
    let transposed = || graph().node("t = Transpose(x)", vec![list("perm", &[1, 0, 2])]);
    transposed()
        .node(
            "r = ReduceMean(t)",
            vec![list("axes", &[0]), int("keepdims", 0)],
        )
        .independent();
    transposed()
        .node("r = ReduceMean(t)", vec![list("axes", &[1])])
        .coupled("reduces over axis 1");
    transposed()
        .node("s = Softmax(t)", vec![int("axis", 0)])
        .node("y = Transpose(s)", vec![list("perm", &[1, 0, 2])])
        .with(12, value("y", FLOAT, &[-1, 4, 8]))
        .independent();
    transposed()
        .with(12, value("t", FLOAT, &[4, -1, 8]))
        .coupled("output 't' carries the batch on axis 1");
}

#[test]
fn softmax_follows_its_operator_set() {
    graph().node("y = Softmax(x)", vec![]).independent();
    graph()
        .node("y = Softmax(x)", vec![int("axis", 0)])
        .coupled("normalizes over axis 0");
    graph()
        .opset(11)
        .node("y = Softmax(x)", vec![])
        .independent();
    graph()
        .opset(11)
        .node("t = Transpose(x)", vec![list("perm", &[1, 0, 2])])
        .node("y = LogSoftmax(t)", vec![])
        .coupled("normalizes over axis 1");
}

#[test]
fn joining_splitting_and_sorting_couple_rows_along_the_batch() {
    for (line, axis) in [
        ("y = Concat(x,x)", 0),
        ("y,z = Split(x)", 0),
        ("y,z = TopK(x,ones)", 0),
        ("y = Compress(x,ones)", 0),
        ("y = Hardmax(x)", 0),
    ] {
        graph()
            .node(line, vec![int("axis", axis)])
            .coupled("axis 0");
        graph().node(line, vec![int("axis", 2)]).independent();
    }
    graph()
        .node("y = CumSum(x,zero)", vec![])
        .coupled("accumulates over axis 0");
    graph().node("y = CumSum(x,last)", vec![]).independent();
    for op in ["NonZero", "Unique", "NonMaxSuppression", "Compress"] {
        graph()
            .node(&format!("y = {op}(x)"), vec![])
            .coupled("whole batch");
    }
    graph().node("y = NonZero(W)", vec![]).independent();
    graph()
        .node("y = MeanVarianceNormalization(x)", vec![])
        .coupled("axis 0");
    graph()
        .node("y = LayerNormalization(x,B)", vec![])
        .independent();
}

#[test]
fn picking_rows_couples_them() {
    graph()
        .node("y = Gather(x,zero)", vec![])
        .coupled("picks entries along axis 0");
    graph()
        .node("y = Gather(x,zero)", vec![int("axis", 1)])
        .independent();
    graph()
        .node("e = Gather(W,ids)", vec![])
        .node("y = ReduceMean(e)", vec![list("axes", &[1])])
        .independent();
    graph()
        .node("y = Slice(x,zeros,ones,zeros)", vec![])
        .coupled("takes a part of axis 0");
    graph()
        .node("y = Slice(x,zeros,ones,ones)", vec![])
        .independent();
    graph()
        .node("y = Slice(x,zeros,end,zeros)", vec![])
        .independent();
    graph()
        .with(5, ints("far", &[1], &[1_000_000_000]))
        .node("y = Slice(x,zeros,far,zeros)", vec![])
        .independent();
}

#[test]
fn products_couple_rows_when_they_sum_over_them_or_pair_them() {
    graph()
        .node("y = MatMul(x,W)", vec![])
        .node("z = Add(y,B)", vec![])
        .independent();
    graph().node("y = MatMul(W,x)", vec![]).independent();
    graph().node("y = Gemm(v,W)", vec![]).independent();
    graph()
        .node("y = Gemm(ids,W)", vec![int("transA", 1)])
        .coupled("sums over");
    graph()
        .node("y = MatMul(W,ids)", vec![])
        .coupled("sums over");
    graph()
        .node("t = Transpose(ids)", vec![])
        .node("y = MatMul(ids,t)", vec![])
        .coupled("combines rows");
    graph()
        .node("t = Transpose(x)", vec![list("perm", &[0, 2, 1])])
        .node("y = MatMul(x,t)", vec![])
        .node("s = Softmax(y)", vec![])
        .independent();
    graph()
        .node("t = Unsqueeze(v,ones)", vec![])
        .node("u = Unsqueeze(v,zeros)", vec![])
        .node("y = Sub(t,u)", vec![])
        .coupled("combines rows");
    graph()
        .node("y = Einsum(x,W)", vec![text("equation", "nij,jk->nik")])
        .independent();
    graph()
        .node("y = Einsum(x,W)", vec![text("equation", "nij,jk->ik")])
        .coupled("sums over");
}

#[test]
fn shapes_computed_from_the_input_do_not_couple_rows() {
    // Attention heads: [N,4,8] -> [N,4,2,4] -> [N,2,4,4].
    graph()
        .node("shape = Shape(x)", vec![])
        .node("n = Gather(shape,zero)", vec![])
        .node("n1 = Unsqueeze(n,zeros)", vec![])
        .node("rest = Constant()", vec![list("value_ints", &[-1, 2, 4])])
        .node("target = Concat(n1,rest)", vec![int("axis", 0)])
        .node("heads = Reshape(x,target)", vec![])
        .node("t = Transpose(heads)", vec![list("perm", &[0, 2, 1, 3])])
        .node("s = Softmax(t)", vec![int("axis", -1)])
        .node("y = ReduceSum(s,last)", vec![])
        .with(12, value("y", FLOAT, &[-1, 2, 4, 1]))
        .independent();
    graph()
        .node("target = Constant()", vec![list("value_ints", &[0, -1])])
        .node("y = Reshape(x,target)", vec![])
        .independent();
    graph()
        .node("target = Constant()", vec![list("value_ints", &[-1, 8])])
        .node("flat = Reshape(x,target)", vec![])
        .node("y = Softmax(flat)", vec![int("axis", 0)])
        .coupled("normalizes over axis 0");
    graph()
        .node("y = Flatten(x)", vec![])
        .node("z = ReduceSum(y,last)", vec![])
        .independent();
}

#[test]
fn a_reshape_that_leaves_no_place_for_the_batch_couples_rows() {
    graph()
        .node("target = Constant()", vec![list("value_ints", &[4, -1, 8])])
        .node("y = Reshape(x,target)", vec![])
        .coupled("reshapes to [4,-1,8]");
    graph()
        .node("target = Constant()", vec![list("value_ints", &[1, 32])])
        .node("y = Reshape(x,target)", vec![])
        .coupled("no first dimension for the batch");
    graph()
        .node("target = Constant()", vec![list("value_ints", &[1, -1])])
        .node("y = Reshape(x,target)", vec![])
        .with(12, value("y", FLOAT, &[1, -1]))
        .coupled("output 'y' carries the batch on axis 1");
}

#[test]
fn chance_and_training_couple_rows() {
    for op in [
        "RandomNormalLike",
        "RandomUniformLike",
        "Multinomial",
        "Bernoulli",
    ] {
        graph()
            .node(&format!("y = {op}(x)"), vec![])
            .coupled("draws random numbers");
    }
    graph()
        .node("y = RandomUniform()", vec![])
        .coupled("draws random numbers");
    graph()
        .node("y = BatchNormalization(x,B,B,B,B)", vec![])
        .independent();
    graph()
        .node(
            "y = BatchNormalization(x,B,B,B,B)",
            vec![int("training_mode", 1)],
        )
        .coupled("training mode");
    let truth = tensor("on", 9, &[]).bytes(9, [1]);
    graph()
        .with(5, truth)
        .node("y = Dropout(x,B,on)", vec![])
        .coupled("drops values at random");
    graph().node("y = Dropout(x)", vec![]).independent();
}

#[test]
fn recurrent_layers_step_through_time_not_rows() {
    graph()
        .node("y,h = LSTM(x,W,W)", vec![])
        .coupled("steps through axis 0");
    graph()
        .node("y,h = GRU(x,W,W)", vec![int("layout", 1)])
        .independent();
    graph()
        .node("t = Transpose(x)", vec![list("perm", &[1, 0, 2])])
        .node("s,h = LSTM(t,W,W)", vec![])
        .node("q = Squeeze(s,ones)", vec![])
        .node("y = Transpose(q)", vec![list("perm", &[1, 0, 2])])
        .with(12, value("y", FLOAT, &[-1, 4, 8]))
        .independent();
}

#[test]
fn control_flow_by_data_couples_rows() {
    let branch = |op: &str| {
        let body = Message::new()
            .message(1, node(&format!("r = {op}(x)"), vec![]))
            .message(12, value("r", FLOAT, &[-1, 4, 8]));
        vec![
            graph_attribute("then_branch", body.clone()),
            graph_attribute("else_branch", body),
        ]
    };
    graph().node("y = If(zero)", branch("Relu")).independent();
    graph()
        .node("y = If(v)", branch("Relu"))
        .coupled("chooses a branch");
    graph()
        .node("y = If(zero)", branch("ReduceSum"))
        .coupled("reduces over all axes");
    let body = |condition: &str| {
        let body = Message::new()
            .message(11, value("i", INT64, &[]))
            .message(11, value("go", 9, &[]))
            .message(11, value("carried", FLOAT, &[-1, 4, 8]))
            .message(1, node("next = Add(carried,x)", vec![]))
            .message(1, node("small = Less(carried,B)", vec![]))
            .message(12, value(condition, 9, &[]))
            .message(12, value("next", FLOAT, &[-1, 4, 8]));
        vec![graph_attribute("body", body)]
    };
    graph()
        .node("y = Loop(zero,zero,x)", body("go"))
        .independent();
    graph()
        .node("y = Loop(zero,zero,W)", body("small"))
        .coupled("ends when values");
    graph()
        .node("y = Loop(v,zero,x)", body("go"))
        .coupled("repeats as often");
    let scan = |axis: i64| {
        let body = Message::new()
            .message(11, value("state", FLOAT, &[-1, 8]))
            .message(11, value("part", FLOAT, &[-1, 8]))
            .message(1, node("sum = Add(state,part)", vec![]))
            .message(12, value("sum", FLOAT, &[-1, 8]))
            .message(12, value("part", FLOAT, &[-1, 8]));
        vec![
            graph_attribute("body", body),
            int("num_scan_inputs", 1),
            list("scan_input_axes", &[axis]),
        ]
    };
    graph()
        .node("y,z = Scan(ids,x)", scan(0))
        .coupled("carries a state from row to row");
    graph().node("y,z = Scan(ids,x)", scan(1)).independent();
}

#[test]
fn functions_of_the_model_are_looked_into() {
    let function = |nodes: Vec<Message>| {
        Message::new()
            .bytes(1, "Mine")
            .bytes(10, "local")
            .bytes(4, "a")
            .bytes(5, "b")
            .messages(7, nodes)
    };
    let findings = |nodes: Vec<Message>| {
        let graph = graph().node("y = local:Mine(x)", vec![]).message;
        let model = model(graph).message(25, function(nodes)).0;
        summarize(&model.as_slice()).unwrap().batch_coupling
    };
    assert_eq!(findings(vec![node("b = Relu(a)", vec![])]), [""; 0]);
    let found = findings(vec![node("b = ReduceMax(a)", vec![])]);
    assert!(found[0].contains("(ReduceMax)"), "{found:?}");
    let circle = findings(vec![
        node("c = local:Mine(a)", vec![]),
        node("b = local:Mine(c)", vec![]),
    ]);
    assert!(circle[0].contains("deep"), "{circle:?}");
}

#[test]
fn functions_and_loops_nested_in_each_other_come_to_an_end() {
    // Each body is looked at several times, and calls the whole again from its innermost loop.
    let mut body = Message::new().message(1, node("deep = local:Mine(x)", vec![]));
    for _ in 0..18 {
        let body_of_loop = body
            .message(11, value("i", INT64, &[]))
            .message(11, value("go", 9, &[]))
            .message(11, value("carried", FLOAT, &[-1]))
            .message(12, value("go", 9, &[]))
            .message(12, value("deep", FLOAT, &[-1]));
        let repeat = node(
            "deep = Loop(zero,zero,B)",
            vec![graph_attribute("body", body_of_loop)],
        );
        body = Message::new().message(1, repeat);
    }
    let function = Message::new()
        .bytes(1, "Mine")
        .bytes(10, "local")
        .bytes(4, "x")
        .bytes(5, "deep")
        .message(7, node("deep = local:Mine(x)", vec![]));
    let graph = Graph {
        message: Message([graph().message.0, body.0].concat()),
        ..graph()
    };
    let model = model(graph.message).message(25, function).0;
    let findings = summarize(&model.as_slice()).unwrap().batch_coupling;
    assert!(!findings.is_empty());
}

#[test]
fn findings_are_few_and_each_is_told_once() {
    let mut many = graph();
    for index in 0..100 {
        let line = format!("y{index} = ReduceMean(x)");
        let node = node(&line, vec![]).bytes(3, format!("mean {index}"));
        many = many.with(1, node);
    }
    let findings = many.findings();
    assert_eq!(findings.len(), 17);
    assert_eq!(findings[16], "84 further operators couple rows");
}
