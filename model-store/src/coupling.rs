//! Whether the rows of a batch influence each other: decided from a model's operators.
//!
//! Follows which axis of each value carries the batch, through the operators models are made of,
//! and reports those that mix along it. Where it loses track it assumes the batch on axis 0 and
//! reports only operators that mix along axis 0: a false alarm costs throughput, a miss a wrong
//! answer.

mod facts;
mod flow;
mod matrices;
mod rules;
mod shapes;
mod step;

use std::collections::{HashMap, HashSet};

use crate::onnx::{Block, Function, NameId, Node, Nodes, shown};

use facts::Fact;
use step::Step;

/// Findings beyond this many are only counted.
const MAX_FINDINGS: usize = 16;
/// The most work on one model, in values and attributes looked at. Loops and functions are looked
/// at more than once, so that nested ones could multiply without end.
const MAX_WORK: u64 = 20_000_000;
/// Work allowed to any model, and for each protobuf field of it.
const WORK: (u64, u64) = (200_000, 4);
/// How deep functions and subgraphs may be nested in each other.
const MAX_NESTING: usize = 48;

/// Sentences on what couples the rows of a batch, each naming node and operator.
pub(crate) fn findings(model: &Nodes) -> Vec<String> {
    let functions = model
        .functions
        .iter()
        .map(|function| {
            (
                (function.domain, function.name, function.overload),
                function,
            )
        })
        .collect();
    let mut analysis = Analysis {
        model,
        functions,
        findings: Vec::new(),
        known: HashSet::new(),
        unlisted: 0,
        work: WORK
            .1
            .saturating_mul(model.fields)
            .saturating_add(WORK.0)
            .min(MAX_WORK),
        nesting: 0,
        opset: model.opset,
    };
    let mut values = Values::default();
    for &(input, rank) in &model.main.inputs {
        let fact = match rank {
            // Requests with a batch dimension cannot give a scalar.
            Some(0) => Fact::fixed(Some(0)),
            _ => Fact::rows(Some(0), rank),
        };
        values.set(input, fact);
    }
    analysis.block(&model.main, &mut values);
    analysis.outputs(&model.main, &values);
    if analysis.unlisted > 0 {
        let more = format!("{} further operators couple rows", analysis.unlisted);
        analysis.findings.push(more);
    }
    analysis.findings
}

/// What is known of each value.
#[derive(Default)]
struct Values {
    facts: HashMap<NameId, Fact>,
    /// Ranks the graph itself tells.
    ranks: HashMap<NameId, usize>,
}

impl Values {
    fn fact(&self, name: NameId) -> Fact {
        self.facts.get(&name).cloned().unwrap_or(Fact::fixed(None))
    }

    fn set(&mut self, name: NameId, mut fact: Fact) {
        if name == 0 {
            return;
        }
        if let Some(&rank) = self.ranks.get(&name) {
            fact.learn_rank(rank);
        }
        self.facts.insert(name, fact);
    }
}

struct Analysis<'a> {
    model: &'a Nodes,
    functions: HashMap<(NameId, NameId, NameId), &'a Function>,
    findings: Vec<String>,
    /// Bodies of loops are looked at more than once.
    known: HashSet<String>,
    unlisted: usize,
    /// What is left of it.
    work: u64,
    nesting: usize,
    opset: i64,
}

impl<'a> Analysis<'a> {
    /// Takes from the work that is allowed; false when nothing is left.
    fn spend(&mut self, work: usize) -> bool {
        let had_some = self.work > 0;
        self.work = self.work.saturating_sub(1 + work as u64);
        if had_some && self.work == 0 {
            self.report("its operators are too many to look at one by one".to_owned());
        }
        self.work > 0
    }

    fn block(&mut self, block: &'a Block, values: &mut Values) {
        if !self.spend(block.constants.len() + block.ranks.len()) {
            return;
        }
        values.ranks.extend(block.ranks.iter().copied());
        for (name, constant) in &block.constants {
            // Old models list every weight among their inputs: an initializer makes it a weight.
            values.set(*name, Fact::constant(constant));
        }
        for node in &block.nodes {
            self.node(node, values);
        }
    }

    fn node(&mut self, node: &'a Node, values: &mut Values) {
        if !self.spend(node.inputs.len() + node.outputs.len() + node.attributes.len()) {
            return;
        }
        let inputs: Vec<Fact> = node.inputs.iter().map(|&name| values.fact(name)).collect();
        if self.nesting == MAX_NESTING {
            self.report(format!(
                "{} is nested more than {MAX_NESTING} deep in functions and subgraphs",
                self.subject(node)
            ));
            return assign(node, vec![Fact::rows(None, None)], values);
        }
        self.nesting += 1;
        let key = (node.domain, node.op, node.overload);
        match self.functions.get(&key) {
            Some(&function) => self.call(node, function, values, inputs),
            None => self.operator(node, values, inputs),
        }
        self.nesting -= 1;
    }

    fn operator(&mut self, node: &'a Node, values: &mut Values, inputs: Vec<Fact>) {
        let step = Step {
            node,
            names: &self.model.names,
            op: self.model.names.text(node.op),
            inputs,
            opset: self.opset,
        };
        let facts = match step.op {
            "If" => self.choice(&step, values),
            "Loop" => self.repetition(&step, values),
            "Scan" => self.scan(&step, values),
            _ => {
                let outcome = rules::outcome(&step);
                if let Some(what) = outcome.coupled {
                    self.report(format!("{} {what}", self.subject(node)));
                }
                outcome.facts
            }
        };
        assign(node, facts, values);
    }

    /// Looks into an operator that the model itself defines.
    fn call(
        &mut self,
        node: &'a Node,
        function: &'a Function,
        values: &mut Values,
        inputs: Vec<Fact>,
    ) {
        let mut inner = Values::default();
        for (&name, fact) in function.inputs.iter().zip(inputs) {
            inner.set(name, fact);
        }
        let outer_opset = self.opset;
        self.opset = function.opset.unwrap_or(outer_opset);
        for node in &function.nodes {
            self.node(node, &mut inner);
        }
        self.opset = outer_opset;
        for (&to, &from) in node.outputs.iter().zip(&function.outputs) {
            values.set(to, inner.fact(from));
        }
    }

    /// Answers are cut apart along axis 0, so that is where outputs must carry the batch.
    fn outputs(&mut self, block: &Block, values: &Values) {
        for &output in &block.outputs {
            if let Fact::Rows {
                axis: Some(axis), ..
            } = values.fact(output)
                && axis != 0
            {
                let name = shown(self.model.names.text(output).as_bytes());
                self.report(format!(
                    "output {name} carries the batch on axis {axis} instead of axis 0"
                ));
            }
        }
    }

    fn report(&mut self, sentence: String) {
        if self.known.contains(&sentence) {
            return;
        }
        if self.findings.len() < MAX_FINDINGS {
            self.known.insert(sentence.clone());
            self.findings.push(sentence);
        } else {
            self.unlisted += 1;
        }
    }

    fn subject(&self, node: &Node) -> String {
        let text = |id| shown(self.model.names.text(id).as_bytes());
        let op = text(node.op).trim_matches('\'').to_owned();
        if node.name != 0 {
            return format!("node {} ({op})", text(node.name));
        }
        match node.outputs.first() {
            Some(&output) => format!("the node that gives {} ({op})", text(output)),
            None => format!("a node without outputs ({op})"),
        }
    }
}

/// Gives a node's outputs their facts; the last one holds for all that remain.
fn assign(node: &Node, facts: Vec<Fact>, values: &mut Values) {
    for (index, &output) in node.outputs.iter().enumerate() {
        let fact = facts.get(index).or(facts.last());
        values.set(output, fact.cloned().unwrap_or(Fact::fixed(None)));
    }
}

#[cfg(test)]
mod tests;
