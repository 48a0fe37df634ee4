# Peers of the LLM benchmarks, each in an environment of its own: `make bench-peers` installs them all.
# PEERS is where they are put. llama.cpp is built for this processor and takes some ten minutes.

PEERS ?= .venv-peers
PEER_PIP = -m pip install --quiet --disable-pip-version-check
PEER_MODEL := safetensors==0.8.*
PEER_TORCH := torch==2.13.0
LLAMACPP_CMAKE := -DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF -DLLAVA_BUILD=OFF

.PHONY: bench-peers bench-peers-transformers bench-peers-llamacpp bench-peers-ctranslate2 bench-peers-openvino bench-peers-tunix bench-peers-hosts bench-peers-recovery bench-llm bench-tune bench-host bench-recovery clean-peers

bench-peers: bench-peers-transformers bench-peers-llamacpp bench-peers-ctranslate2 bench-peers-openvino ## Install what bench-llm compares with

bench-peers-transformers: $(PARITY)/.ready # The plain JAX loop runs there too.

bench-peers-llamacpp: $(PEERS)/llamacpp/.ready

bench-peers-ctranslate2: $(PEERS)/ctranslate2/.ready

bench-peers-openvino: $(PEERS)/openvino/.ready

bench-llm: bench-peers ## The LLM engine beside its peers; results in benchmarks/results
	$(PARITY)/bin/python benchmarks/llm_throughput.py --peers $(PEERS)
	$(PARITY)/bin/python benchmarks/llm_trace.py
	$(PARITY)/bin/python benchmarks/serve_overhead.py

bench-peers-tunix: $(PEERS)/tunix/.ready # TRL runs in the environment of `make parity`.

bench-tune: $(PARITY)/.ready bench-peers-tunix ## Post-training beside TRL and Tunix; results in benchmarks/results
	$(PARITY)/bin/python benchmarks/post_training.py --peers $(PEERS)

HOSTS := ray mlserver litserve bentoml onnxruntime
PEER_JAX := jax==0.10.2 jaxlib==0.10.2
PEER_HTTP := uvicorn==0.54.* uvloop==0.23.* httptools==0.9.*

bench-peers-hosts: $(HOSTS:%=$(PEERS)/%/.ready) # Model servers; 3.5 GB.

bench-host: $(VENV)/.dev bench-peers-hosts ## The model server beside its peers; results in benchmarks/results
	$(BIN)/python benchmarks/model_server.py --peers $(PEERS)
	$(BIN)/python benchmarks/bundle_loading.py

bench-peers-recovery: $(PEERS)/raytrain/.ready

bench-recovery: $(VENV)/.dev bench-peers-recovery ## Recovery beside Ray Train's; results in benchmarks/results
	$(BIN)/python benchmarks/recovery.py --parts peers --peers $(PEERS)

clean-peers:
	rm -rf $(PEERS)

$(PEERS)/llamacpp/.ready: benchmarks/peers.mk
	$(PYTHON) -m venv $(PEERS)/llamacpp
	CMAKE_ARGS="$(LLAMACPP_CMAKE)" $(PEERS)/llamacpp/bin/python $(PEER_PIP) \
	  llama-cpp-python==0.3.36 gguf==0.19.* $(PEER_MODEL)
	@touch $@

$(PEERS)/ctranslate2/.ready: benchmarks/peers.mk
	$(PYTHON) -m venv $(PEERS)/ctranslate2
	$(PEERS)/ctranslate2/bin/python $(PEER_PIP) ctranslate2==4.8.5 transformers==5.23.* $(PEER_TORCH) $(PEER_MODEL)
	@touch $@

# optimum-intel asks for torchvision, which this does not use and which refuses a CPU build of torch.
$(PEERS)/openvino/.ready: benchmarks/peers.mk
	$(PYTHON) -m venv $(PEERS)/openvino
	$(PEERS)/openvino/bin/python $(PEER_PIP) openvino-genai==2026.4.1.0 openvino==2026.4.1 optimum-intel==2.2.0 nncf==3.4.0 $(PEER_TORCH)
	$(PEERS)/openvino/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

$(PEERS)/tunix/.ready: benchmarks/peers.mk
	$(PYTHON) -m venv $(PEERS)/tunix
	$(PEERS)/tunix/bin/python $(PEER_PIP) google-tunix==0.1.7
	@touch $@

$(PEERS)/ray/.ready: benchmarks/peers.mk
	$(PYTHON) -m venv $(PEERS)/ray
	$(PEERS)/ray/bin/python $(PEER_PIP) "ray[serve]==2.60.0" $(PEER_JAX) $(PEER_HTTP)
	@touch $@

$(PEERS)/mlserver/.ready: benchmarks/peers.mk
	$(PYTHON) -m venv $(PEERS)/mlserver
	$(PEERS)/mlserver/bin/python $(PEER_PIP) mlserver==1.7.1 $(PEER_JAX)
	@touch $@

$(PEERS)/litserve/.ready: benchmarks/peers.mk
	$(PYTHON) -m venv $(PEERS)/litserve
	$(PEERS)/litserve/bin/python $(PEER_PIP) litserve==0.2.19 $(PEER_JAX) $(PEER_HTTP)
	@touch $@

$(PEERS)/bentoml/.ready: benchmarks/peers.mk
	$(PYTHON) -m venv $(PEERS)/bentoml
	$(PEERS)/bentoml/bin/python $(PEER_PIP) bentoml==1.4.39 $(PEER_JAX) $(PEER_HTTP)
	@touch $@

$(PEERS)/onnxruntime/.ready: benchmarks/peers.mk
	$(PYTHON) -m venv $(PEERS)/onnxruntime
	$(PEERS)/onnxruntime/bin/python $(PEER_PIP) onnxruntime==1.31.1 onnx==1.23.2 orjson==3.* $(PEER_HTTP)
	@touch $@

$(PEERS)/raytrain/.ready: benchmarks/peers.mk
	$(PYTHON) -m venv $(PEERS)/raytrain
	$(PEERS)/raytrain/bin/python $(PEER_PIP) "ray[train]==2.60.0" $(PEER_JAX) optax==0.2.8
	@touch $@
