#!/usr/bin/env python3
"""Checks the manifests of this folder: renders them, holds each against its schema, and all against each other.

  pip install kubernetes-validate jsonschema cel-python pyyaml
  check.py [--crd FILE] [--moebius PROGRAM]

Rendering takes `kubectl` or `kustomize`. The InferencePool's schema is its definition in the Gateway API Inference
Extension, config/crd/bases/inference.networking.k8s.io_inferencepools.yaml; without --crd it is not held against it.
With --moebius the program is started as the Deployment does, without its model, and its probes are asked. Copies of the
manifests with one mistake each must be refused, else the check fails.
"""

import argparse
import copy
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import celpy
import jsonschema
import kubernetes_validate
import yaml

HERE = Path(__file__).parent
VERSION = kubernetes_validate.latest_version()


class Wrong(Exception):
    """What is wrong with a manifest."""


def rendered():
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(command[0]):
            text = subprocess.run([*command, HERE], check=True, capture_output=True, text=True).stdout
            return list(yaml.safe_load_all(text))
    sys.exit("neither kubectl nor kustomize is there")


def closed(schema):
    """A schema whose objects have no other fields: an API server would drop them in silence, or warn."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: closed(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        schema.setdefault("additionalProperties", False)
    return schema


def filled(value, schema):
    """A value with the schema's defaults."""
    if isinstance(value, dict):
        for key, part in schema.get("properties", {}).items():
            if key not in value and "default" in part:
                value[key] = copy.deepcopy(part["default"])
            elif key in value:
                filled(value[key], part)
    elif isinstance(value, list):
        for part in value:
            filled(part, schema.get("items", {}))
    return value


def check_rules(value, schema, path="pool"):
    """Holds a value against the rules in the Common Expression Language of its schema."""
    for rule in schema.get("x-kubernetes-validations", []):
        environment = celpy.Environment()
        program = environment.program(environment.compile(rule["rule"]))
        if not program.evaluate({"self": celpy.json_to_cel(value)}):
            raise Wrong(f"{path}: {rule.get('message', rule['rule'])}")
    if isinstance(value, dict):
        for key, part in schema.get("properties", {}).items():
            if key in value:
                check_rules(value[key], part, f"{path}.{key}")
    elif isinstance(value, list):
        for part in value:
            check_rules(part, schema.get("items", {}), f"{path}[]")


def check_pool(pool, crd):
    group, version = pool["apiVersion"].split("/")
    versions = [part for part in crd["spec"]["versions"] if part["name"] == version and part["served"]]
    if (crd["spec"]["group"], crd["spec"]["names"]["kind"], len(versions)) != (group, pool["kind"], 1):
        raise Wrong(f"{pool['apiVersion']} {pool['kind']} is not what the definition serves")
    schema = versions[0]["schema"]["openAPIV3Schema"]
    # What an API server knows of all objects.
    value = filled({key: part for key, part in pool.items() if key != "metadata"}, schema)
    value.pop("status", None)
    try:
        jsonschema.Draft4Validator(closed(schema)).validate(value)
    except jsonschema.ValidationError as error:
        raise Wrong(f"{'.'.join(map(str, error.absolute_path))}: {error.message}") from error
    check_rules(value, schema)


def check_each(documents, crd):
    for document in documents:
        if document["kind"] == "InferencePool":
            if crd:
                check_pool(document, crd)
            continue
        try:
            kubernetes_validate.validate(copy.deepcopy(document), VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Wrong(f"{document['kind']} {'.'.join(map(str, error.path))}: {error.message}") from error


def only(documents, kind):
    found = [document for document in documents if document["kind"] == kind]
    if len(found) != 1:
        raise Wrong(f"{len(found)} of {kind}")
    return found[0]


def check_together(documents):
    """What no schema says: names, ports and times that have to agree."""
    deployment, service, pool = (only(documents, kind) for kind in ("Deployment", "Service", "InferencePool"))
    pod = deployment["spec"]["template"]
    labels, container = pod["metadata"]["labels"].items(), pod["spec"]["containers"][0]
    for name, selector in (
        ("Deployment", deployment["spec"]["selector"]["matchLabels"]),
        ("Service", service["spec"]["selector"]),
        ("InferencePool", pool["spec"]["selector"]["matchLabels"]),
    ):
        if not selector.items() <= labels:
            raise Wrong(f"{name} selects {selector}, pods have {dict(labels)}")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    named = [container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    for name in [*named, *(port["targetPort"] for port in service["spec"]["ports"])]:
        if name not in ports:
            raise Wrong(f"no port is called {name}")
    scraped = int(pod["metadata"]["annotations"]["prometheus.io/port"])
    for number in [*(port["number"] for port in pool["spec"]["targetPorts"]), scraped]:
        if number not in ports.values():
            raise Wrong(f"no container listens on {number}")
    drain = int(container["args"][container["args"].index("--drain-seconds") + 1])
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"] + drain
    if waits >= pod["spec"]["terminationGracePeriodSeconds"]:
        raise Wrong(f"pods are killed after {pod['spec']['terminationGracePeriodSeconds']} s, and drain for {waits}")
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    for mount in container["volumeMounts"]:
        if mount["name"] not in volumes:
            raise Wrong(f"no volume is called {mount['name']}")
    if container["image"].count(":") != 1 or container["image"].startswith("moebius"):
        raise Wrong(f"the image {container['image']} is not where kustomization.yaml says")


def check_program(documents, program):
    """Starts the container's command without its model; its port and its probes are as the manifests say."""
    container = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    args = list(container["args"])
    at = args.index("-m")
    del args[at : at + 2]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    env = {**os.environ, **{part["name"]: part["value"] for part in container["env"]}}
    env |= {"MOEBIUS_HOST": "127.0.0.1", "MOEBIUS_PORT": str(port), "MOEBIUS_CONFIG": ""}
    env.pop("XDG_CACHE_HOME")
    process = subprocess.Popen([program, *args], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path, end = container[probe]["httpGet"]["path"], time.monotonic() + 60
            while True:
                try:
                    urllib.request.urlopen(f"http://localhost:{port}{path}", timeout=10).close()
                    break
                except urllib.error.HTTPError as error:
                    raise Wrong(f"{probe}: {path} is answered with {error.code}") from error
                except OSError as error:
                    if process.poll() is not None or time.monotonic() > end:
                        raise Wrong(f"{probe}: {error}; the program ended with {process.poll()}") from error
                    time.sleep(0.1)
        metrics = urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10).read().decode()
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
            if f"\nvllm:{name}{{" not in metrics:
                raise Wrong(f"/metrics has no vllm:{name}")
        process.terminate()
        if process.wait(30) != 0:
            raise Wrong(f"told to stop, the program ended with {process.returncode}")
    finally:
        process.kill()


def at(document, path):
    for key in path[:-1]:
        document = document[key]
    return document


# Mistakes, one each: kind, where, and what is there then (None: nothing).
POD = ("spec", "template", "spec")
SERVER = (*POD, "containers", 0)
MISTAKES = [
    ("Deployment", ("spec", "replicas"), "two"),
    ("Deployment", ("spec", "replica"), 2),
    ("Deployment", (*SERVER, "readinessProbe", "httpGet", "port"), "web"),
    ("Deployment", (*SERVER, "lifecycle", "preStop", "sleep", "seconds"), 30),
    ("Deployment", (*SERVER, "volumeMounts", 0, "name"), "model"),
    ("Deployment", (*SERVER, "ports", 0, "containerPort"), 8000),
    ("Deployment", ("spec", "template", "metadata", "labels", "app"), "other"),
    ("Service", ("spec", "selector", "app"), "other"),
    ("Service", ("spec", "ports", 0, "targetPort"), "web"),
    ("InferencePool", ("spec", "selector", "matchLabels", "app"), "other"),
    ("InferencePool", ("spec", "targetPorts", 0, "number"), 8000),
]
MISTAKES_OF_POOL = [
    ("InferencePool", ("apiVersion",), "inference.networking.k8s.io/v1alpha2"),
    ("InferencePool", ("spec", "endpointPickerRef", "port"), None),
    ("InferencePool", ("spec", "endpointPickerRef", "portNumber"), 9002),
    ("InferencePool", ("spec", "endpointPickerRef", "failureMode"), "Open"),
    ("InferencePool", ("spec", "targetPorts"), [{"number": 8080}, {"number": 8080}]),
    ("InferencePool", ("spec", "selector"), {"app": "moebius"}),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--crd", type=Path)
    parser.add_argument("--moebius")
    args = parser.parse_args()
    crd = yaml.safe_load(args.crd.read_text()) if args.crd else None
    documents = rendered()
    try:
        check_each(documents, crd)
        check_together(documents)
        if args.moebius:
            check_program(documents, args.moebius)
    except Wrong as wrong:
        print(f"wrong: {wrong}")
        return 1
    mistakes = MISTAKES + (MISTAKES_OF_POOL if crd else [])
    for kind, path, value in mistakes:
        changed = copy.deepcopy(documents)
        place = at(only(changed, kind), path)
        if value is None:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        try:
            check_each(changed, crd)
            check_together(changed)
        except Wrong:
            continue
        print(f"not noticed: {kind} with {path[-1]} {value}")
        return 1
    names = ", ".join(document["kind"] for document in documents)
    bundle = crd and crd["metadata"]["annotations"]["inference.networking.k8s.io/bundle-version"]
    against = f"Kubernetes {VERSION}" + (f" and InferencePool {bundle}" if crd else "; InferencePool against no schema")
    print(f"{names}: right against {against}; {len(mistakes)} mistakes were noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
