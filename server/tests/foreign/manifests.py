"""Checks the example manifests: core kinds against Kubernetes' own schemas, others against ours."""

import copy
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

KUBERNETES = ["1.31", "1.34", "1.37"]
folder = Path(sys.argv[1])
schemas = {
    path.name: json.loads(path.read_text()) for path in sorted((folder / "schemas").glob("*.json"))
}
registry = Registry().with_resources(
    (name, Resource.from_contents(schema)) for name, schema in schemas.items()
)


def of_kubernetes(document):
    """Problems of a core kind; none when all is well."""
    problems = []
    for version in KUBERNETES:
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            problems.append(f"{version}: {error.message}")
    return problems


def of_schema(name, document):
    validator = Draft202012Validator(schemas[name], registry=registry)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def problems(path, document):
    if document["apiVersion"] in ("v1", "apps/v1"):
        return of_kubernetes(document)
    return of_schema(f"{path.stem}.json", document)


def inner_objects(value, path=()):
    """Every object inside a document, with the way to it."""
    if isinstance(value, dict):
        yield path
        for key, child in value.items():
            yield from inner_objects(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from inner_objects(child, (*path, index))


# Maps of the user's own keys: a further one is no mistake. KEDA's metadata has a schema here.
OPEN = {"labels", "annotations", "matchLabels", "selector", "requests", "limits"}

for name in schemas:
    Draft202012Validator.check_schema(schemas[name])

seen = set()
for path in sorted(folder.glob("*.yaml")):
    for document in yaml.safe_load_all(path.read_text()):
        kind = document["kind"]
        found = problems(path, document)
        assert not found, f"{path.name}, {kind}: {found}"
        caught = 0
        for way in inner_objects(document):
            if way and way[-1] in OPEN:
                continue
            wrong = copy.deepcopy(document)
            place = wrong
            for step in way:
                place = place[step]
            place["noSuchField"] = "x"
            assert problems(path, wrong), f"{path.name}: noSuchField at {way} was not noticed"
            caught += 1
        seen.add((document["apiVersion"].split("/")[0], kind))
        print(f"ok {path.name} {kind}: {caught} wrong fields caught")

expected = {
    ("apps", "Deployment"),
    ("v1", "Service"),
    ("keda.sh", "ScaledObject"),
    ("serving.kserve.io", "ClusterServingRuntime"),
    ("serving.knative.dev", "Service"),
}
assert expected <= seen, f"missing: {expected - seen}"

# What no schema says.
(deployment, _) = yaml.safe_load_all((folder / "deployment.yaml").read_text())
pod = deployment["spec"]["template"]["spec"]
flags = dict(arg[2:].split("=") for arg in pod["containers"][0]["args"] if "=" in arg)
ending = int(flags["drain-delay"].removesuffix("s")) + int(flags["exit-timeout-secs"]) + 5
assert ending < pod["terminationGracePeriodSeconds"], "killed before it has ended by itself"
print("ok the grace period is longer than the way out")
