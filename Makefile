# SPDX-License-Identifier: Apache-2.0
# kvroute's commands. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN       := .cache/bin/kvroute
DEMO      ?=
FUZZTIME  ?= 30s
GOLANGCI  := go tool -modfile=tools/go.mod golangci-lint
VALE      := go tool -modfile=$(CURDIR)/tools/vale/go.mod vale --config $(CURDIR)/tools/vale/vale.ini --output line
# The measured commit: its full hash, with "-dirty" appended if the tree differs from the commit.
COMMIT     = $(shell git describe --always --abbrev=40 --exclude='*' --dirty)
# The race detector needs a C compiler; without one the tests run without it.
RACE      := $(shell command -v cc >/dev/null 2>&1 && echo -race)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: build envoy ## compare routing by cache with round robin under the same load, through a real Envoy (DEMO=--keep leaves the demo running, DEMO=--core runs without JetStream, DEMO=--hot plays chats that share one long prompt, DEMO=--split compares aggregated workers with prefill and decode workers)
	@$(BIN) demo $(DEMO)

.PHONY: bench-demo
bench-demo: build envoy ## play the demo three times and report its figures against targets (REPLICAS=4: several router replicas against one; GROUPS=2: router groups against one router; HOT=1: chats that share one long prompt)
	@$(BIN) demo --rounds $(or $(ROUNDS),3) $(if $(REPLICAS),--replicas $(REPLICAS)) $(if $(GROUPS),--groups $(GROUPS)) $(if $(HOT),--hot) --report bench/out --commit "$(COMMIT)"

# Folder in which Dynamo's index is built with Rust, to compare with it, as .cache/dynamo-index; empty leaves it out.
DYNAMO_INDEX =

.PHONY: bench-index
bench-index: tools ## measure the index against its targets (ROUNDS=5, ONLY=name; DYNAMO_INDEX=.cache/dynamo-index compares with Dynamo's index, which Rust builds there in a quarter of an hour; BASE=folder of an earlier checkout to compare index and decisions with, 9 minutes)
	@$(if $(DYNAMO_INDEX),nice cargo build --quiet --release --locked --manifest-path bench/dynamo/Cargo.toml --target-dir $(DYNAMO_INDEX))
	@go run bench/main.go index --dynamo '$(addsuffix /release/bench-dynamo,$(DYNAMO_INDEX))' --rounds $(or $(ROUNDS),5) --only '$(ONLY)' --base '$(BASE)' --commit "$(COMMIT)"

DYNAMO = .cache/dynamo

.PHONY: bench-front
bench-front: build envoy ## compare Envoy with kvroute, Envoy alone, Envoy with a processor that does nothing, and Dynamo's frontend (30 minutes; ROUNDS=9, ONLY=name; DYNAMO= leaves Dynamo out; once downloads 0.2 GB from PyPI)
	@$(if $(DYNAMO),tools/dynamo.sh $(DYNAMO))
	@go build -o .cache/bin/bench-envoy ./bench/envoy
	@.cache/bin/bench-envoy --dynamo '$(DYNAMO)' --shared $(or $(KVROUTE_SHARED),../shared)/data --rounds $(or $(ROUNDS),9) --only '$(ONLY)' --commit "$(COMMIT)"

.PHONY: bench-pd
bench-pd: build envoy ## measure what a prefill leg adds to a request, and simulate a split model on public traces in TRACES (2 minutes; ROUNDS=15, ONLY=legs, rewrite, killed or replay)
	@go build -o .cache/bin/bench-envoy ./bench/envoy
	@.cache/bin/bench-envoy --split --traces $(TRACES) --rounds $(or $(ROUNDS),15) --only '$(ONLY)' --commit "$(COMMIT)"

.PHONY: bench-see
bench-see: build envoy ## measure what audit, metrics, traces and an open dashboard cost (3 minutes; ROUNDS=15, BASE=path of an earlier kvroute to compare with)
	@go build -o .cache/bin/bench-envoy ./bench/envoy
	@.cache/bin/bench-envoy --see --rounds $(or $(ROUNDS),15) --base '$(BASE)' --commit "$(COMMIT)"

.PHONY: bench-workers
bench-workers: build envoy ## measure what clients see of workers with faults, and what it costs to watch 500 workers (6 minutes; ONLY=cost, health, new, refused, status or silence; silence needs root on Linux)
	@go build -o .cache/bin/bench-envoy ./bench/envoy
	@.cache/bin/bench-envoy --faults --only '$(ONLY)' --commit "$(COMMIT)"

.PHONY: bench-events
bench-events: tools ## measure events, snapshots and the start of a replica against their targets (ROUNDS=3, ONLY=name; BASE=folder of an earlier checkout to compare with, ROUNDS=5)
	@go run bench/main.go events --rounds $(or $(ROUNDS),$(if $(BASE),5,3)) --only '$(ONLY)' --base '$(BASE)' --commit "$(COMMIT)"

TRACES := $(or $(KVROUTE_SHARED),../shared)/data/traces

.PHONY: bench-policy
bench-policy: tools ## simulate all routing policies against their targets on public traces in TRACES (10 minutes; SEEDS=3)
	@go run bench/main.go policy --traces $(TRACES) --rounds $(or $(SEEDS),3) --commit "$(COMMIT)"

.PHONY: bench-fleet
bench-fleet: tools ## compare replicas and router groups with one router on public traces in TRACES, and measure their messages (8 minutes; SEEDS=3)
	@go run bench/main.go fleet --traces $(TRACES) --rounds $(or $(SEEDS),3) --commit "$(COMMIT)"

# Each run of the tests has its own file, since two runs may share this folder.
test test-plain test-raced: export KVROUTE_FIXTURES_LOG ?= $(CURDIR)/.cache/fixtures-$(shell echo $$PPID).log

# Packages without shared state, or with their state in other processes. `make test` runs their tests without the race
# detector, except the tests named in SHARED. `make test-long` runs all tests with it.
PLAIN  := ./bench/... ./cmd/... ./envoy/... ./events/saved/... ./internal/arch/... ./internal/openai/... ./tokenizer/...
SHARED := ManyGoroutines|Concurrent

.PHONY: test
test: tools envoy promtool ## run the tests, in less than 10 minutes on two cores, and print how much reference data was available
	@test -n "$(RACE)" || echo "no C compiler: the tests run without the race detector"
	go vet ./...
	@$(MAKE) --no-print-directory fix
	@mkdir -p .cache && rm -f "$$KVROUTE_FIXTURES_LOG"
	@$(MAKE) --no-print-directory -j2 test-plain test-raced
	@if tools/browser.sh >/dev/null; then $(MAKE) --no-print-directory test-browser; fi
	@go test -count=1 -v -run '^TestReferenceData$$' ./internal/fixtures | sed -n 's/^.*_test.go:[0-9]*: //p'
	@rm -f "$$KVROUTE_FIXTURES_LOG"

GOTEST := go test -vet=off -timeout 40m -shuffle=on -count=1

.PHONY: test-plain test-raced
test-plain:
	@$(GOTEST) -parallel 4 $(PLAIN)
test-raced:
	@$(GOTEST) $(RACE) $$(go list ./... | grep -vxF "$$(go list $(PLAIN))")
	@$(GOTEST) $(RACE) -run '$(SHARED)' ./tokenizer/...

.PHONY: test-long
test-long: tools envoy promtool ## run all tests with the race detector, and the long forms of random worlds, restarts and faults (half an hour; builds OpenTelemetry's collector from its modules)
	@tools/browser.sh >/dev/null
	KVROUTE_LONG=1 go test $(RACE) -timeout 90m -shuffle=on -count=1 -parallel 4 ./...
	@$(MAKE) --no-print-directory test-browser test-helm

.PHONY: test-security
test-security: tools envoy ## replay the attacks of SECURITY.md with headers, bodies and paths in each Envoy configuration, while kvroute decides and while it is dead (1 minute)
	@go test -count=1 -v -run '^TestSecurity$$' ./cmd/kvroute | grep -v '^=== '

.PHONY: test-helm
test-helm: ## test the Helm chart with Helm's linter and Kubernetes' types (1 minute; builds Helm's module once)
	go test -C tools/helm -count=1 .

.PHONY: test-kubernetes
test-kubernetes: build envoy ## install the Helm chart in a real etcd, kube-apiserver and controllers, with Envoy and Envoy Gateway, under load, in a network namespace of its own (6 minutes; builds Kubernetes, Helm and Envoy Gateway once: 15 to 40 minutes; ONLY=part of a variant's name)
	@tools/kubernetes.sh $(CURDIR)/$(BIN) -only '$(ONLY)'

.PHONY: test-istio
test-istio: build envoy ## run Istio's own control plane with the EnvoyFilter of docs/existing-envoy.md, a real Envoy and simulated workers (1 minute; builds Istio and Kubernetes once: 15 to 40 minutes)
	@tools/istio.sh $(CURDIR)/$(BIN)

.PHONY: soak
soak: tools envoy ## play mixed load with killed processes and lost events through Envoy, three times the workers' capacity, and 500 bodies of 10 MB; compare the index with the engines' caches afterwards (FOR=10m)
	KVROUTE_LONG=1 KVROUTE_SOAK=$(or $(FOR),10m) go test -count=1 -timeout 0 -v -run '^(TestSoak|TestOverload|TestLargeBodiesWithinTheBudget)$$' ./cmd/kvroute

.PHONY: test-browser
test-browser: build ## test the dashboard in headless Chromium against the API and with axe-core, and print its processor time with 512 workers
	@BROWSER=$$(tools/browser.sh) && AXE=$$(tools/axe.sh) && export BROWSER AXE && go vet -C bench/browser . && \
		go test -C bench/browser -count=1 -v . | sed -n '/^=== /d; s/^ *[a-z]*_test.go:[0-9]*: //; p'

.PHONY: pictures
pictures: build envoy ## make the documents' pictures of the dashboard in headless Chromium, under the demo's load (10 minutes; MINUTES=5 of load before the first picture)
	@BROWSER=$$(tools/browser.sh) && export BROWSER && tools/pictures.sh

.PHONY: gateway
gateway: tools ## translate examples/envoy-gateway again with Envoy Gateway's own tool and compare (builds the tool: 20 minutes once; WRITE=1 replaces the committed files)
	@tools/gateway.sh $(if $(WRITE),--write)

.PHONY: test-gateway
test-gateway: build envoy ## run Envoy Gateway's own binary with examples/envoy-gateway and a real Envoy, route requests, kill kvroute and a worker (builds Envoy Gateway once: 5 to 20 minutes)
	@tools/testgateway.sh

ENVOYS := 1.38.2 1.38.3 1.39.0 1.39.1 1.39.3 1.40.0

.PHONY: test-envoys
test-envoys: tools promtool ## run the tests with a real Envoy, for every supported version of Envoy (ENVOYS; 10 minutes and 150 MB each)
	@for v in $(ENVOYS); do \
		tools/envoy.sh $$v && echo "Envoy $$v" && \
		PATH="$(CURDIR)/.cache/envoy-$$v/bin:$$PATH" go test -count=1 ./envoy ./internal/envoytest ./cmd/kvroute || exit 1; \
	done

.PHONY: check
check: tools lint fix ## the inner loop: lint, house rules, short tests
	go test -short -count=1 ./...

REFERENCE := .cache/reference/bin/python

.PHONY: conformance
conformance: tools $(REFERENCE) ## compare tokenizer and templates with the reference implementations, and their speed, in 10 minutes (OUT=folder, ONLY=name; downloads 230 MB from PyPI once; ENGINES=1 compares requests with the releases of engines in tools/engines.txt, ENGINES=vllm-0.34.0 with that release: 2 GB from PyPI once)
	@$(REFERENCE) tools/templates.py .cache/templates
	@$(if $(ENGINES),tools/vllm.sh .cache/vllm)
	@engines=$$($(if $(ENGINES),tools/engines.sh $(filter-out 1,$(ENGINES)),:)) && \
		go run ./bench/conformance --python $(REFERENCE) --templates .cache/templates --commit "$(COMMIT)" $(if $(ENGINES),--engines "$$engines") $(if $(OUT),--out $(OUT)) $(if $(ONLY),--only '$(ONLY)')

# The groups of checks to install programs for: all, or those that ONLY names. The checks of vLLM also need the clients; pd are
# the checks of two vLLM engines that share the work on each request.
INTEROP := clients dynamo vllm
comma   := ,
NAMED    = $(or $(filter $(INTEROP),$(patsubst hybrid,vllm,$(patsubst pd,vllm,$(subst $(comma), ,$(ONLY))))),$(INTEROP))
INSTALL  = $(sort $(NAMED) $(if $(filter vllm,$(NAMED)),clients))

.PHONY: test-interop
test-interop: build envoy ## test kvroute with a real vLLM, Dynamo and common clients (15 minutes, 8 GB of memory; ONLY=clients, or a part of a check's name; once downloads 3 GB from PyPI and npm into .cache)
	@for group in $(INSTALL); do tools/$$group.sh .cache/$$group || exit 1; done
	@go build -o .cache/bin/interop ./bench/interop
	@.cache/bin/interop --only '$(ONLY)' --commit "$(COMMIT)" $(if $(OUT),--out $(OUT)) \
		$(foreach group,$(INSTALL),--$(group) .cache/$(group))

.PHONY: golden
golden: $(REFERENCE) ## regenerate the golden data and the Unicode tables
	$(REFERENCE) tools/golden/unicode.py > .cache/unicode_table.go
	mv .cache/unicode_table.go tokenizer/unicode_table.go && gofmt -w tokenizer/unicode_table.go
	$(REFERENCE) tools/golden/tokenizers_golden.py tokenizer/testdata/golden internal/enginesim/model/tokenizer.json
	$(REFERENCE) tools/golden/auto_golden.py tokenizer/testdata/auto/transformers5.jsonl
	python3 -m venv .cache/transformers4 && .cache/transformers4/bin/pip install --quiet --disable-pip-version-check transformers==4.57.6
	.cache/transformers4/bin/python tools/golden/auto_golden.py tokenizer/testdata/auto/transformers4.jsonl
	TZ=UTC $(REFERENCE) tools/golden/templates_golden.py tokenizer/jinja/testdata/golden.jsonl
	TZ=UTC $(REFERENCE) tools/golden/python_golden.py tokenizer/jinja/testdata/methods.jsonl tokenizer/jinja/testdata/filters.jsonl
	$(REFERENCE) tools/golden/front_golden.py internal/openai/testdata/front.jsonl
	$(REFERENCE) tools/golden/harmony_golden.py tokenizer/chat/testdata/harmony.jsonl
	$(REFERENCE) tools/golden/mistral_golden.py tokenizer/testdata/mistral

$(REFERENCE): tools/golden/requirements.txt
	@command -v python3 >/dev/null || { echo "make: Python 3 is missing" >&2; exit 1; }
	python3 -m venv .cache/reference
	$(REFERENCE) -m pip install --quiet --disable-pip-version-check -r tools/golden/requirements.txt
	@touch $(REFERENCE)

.PHONY: build
build: tools ## build the binary into .cache/bin
	@CGO_ENABLED=0 go build -trimpath -o $(BIN) ./cmd/kvroute

.PHONY: envoy
envoy: ## install a pinned Envoy into .cache, unless Envoy is on PATH
	@tools/envoy.sh

.PHONY: promtool
promtool: .cache/bin/promtool ## build Prometheus' promtool, which tests the alert rules (once, 1 to 4 minutes)

.cache/bin/promtool: tools/promtool/go.mod tools/promtool/go.sum
	@command -v go >/dev/null || { echo "make: Go is missing: install Go 1.26 or later" >&2; exit 1; }
	@echo "building promtool (once, into .cache/bin)"
	@CGO_ENABLED=0 go build -C tools/promtool -trimpath -ldflags '-s -w' -tags remove_all_sd -o $(CURDIR)/$@ github.com/prometheus/prometheus/cmd/promtool

.PHONY: tools
tools:
	@command -v go >/dev/null || { echo "make: Go is missing: install Go 1.26 or later" >&2; exit 1; }

.PHONY: lint
lint: prose ## run golangci-lint and the prose linter, and check the formatting
	$(GOLANGCI) run ./...
	$(GOLANGCI) fmt --diff ./...

PROSE    := .cache/prose
COMMANDS := serve config publish replay demo doctor explain tokenize top

.PHONY: prose
prose: build ## run the prose linter (vale) over README, docs, examples, help texts and comments
	@rm -rf $(PROSE) && mkdir -p $(PROSE)
	@for c in $(COMMANDS); do $(BIN) $$c -h 2>&1 | sed 's/^[ \t]*//; s/$$/\n/' > $(PROSE)/help-$$c.md || true; done
	@for p in $$(go list ./...); do go doc $$p | sed '1d; /^\(const\|var\|func\|type\) /,$$d' > $(PROSE)/package-$$(basename $$p).md; done
	$(VALE) README.md SECURITY.md CONTRIBUTING.md ARCHITECTURE.md CHANGELOG.md docs/*.md examples/*/README.md $(PROSE) $$(git ls-files '*.go')

.PHONY: generate
generate: tools ## write what is generated from the code: help texts of flags, docs/configuration.md and the table of packages in ARCHITECTURE.md
	KVROUTE_WRITE=1 go test -count=1 -run '^TestHelpTexts$$' ./internal/settings
	KVROUTE_WRITE=1 go test -count=1 -run '^TestConfigurationPage$$' ./cmd/kvroute
	KVROUTE_WRITE=1 go test -count=1 -run '^TestPackageTable$$' ./internal/arch

.PHONY: vulnerabilities
vulnerabilities: tools ## run govulncheck: known vulnerabilities in functions that kvroute calls (sends requests to vuln.go.dev)
	go tool -modfile=tools/go.mod govulncheck ./...

.PHONY: house
house: tools ## print the tokens of each package, its long lines, its longest function and its references between files, and fail above a limit
	@go test -count=1 -v -run '^TestHouse$$' ./internal/arch | sed -n 's/^ *house_test.go:[0-9]*: //p; /^FAIL/q1'

.PHONY: fmt
fmt: ## format the code
	$(GOLANGCI) fmt ./...

.PHONY: fix
fix:
	@diff=$$(go fix -diff ./... 2>&1) || { echo "$$diff"; echo "go fix has something to modernise: run go fix ./..." >&2; exit 1; }

.PHONY: fuzz
fuzz: ## run each fuzz target for FUZZTIME
	@failed=; for package in $$(grep -rl --include='*_test.go' '^func Fuzz' . | xargs -n1 dirname | sort -u); do \
		for target in $$(grep -rhoE '^func Fuzz[A-Za-z0-9_]*' $$package/*_test.go | sed 's/^func //'); do \
			echo "$$package $$target"; go test $$package -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 2s || failed="$$failed $$target"; \
		done; \
	done; if [ -n "$$failed" ]; then echo "these fuzz targets failed:$$failed" >&2; exit 1; fi

.PHONY: cover
cover: ## print the share of statements that the short tests run
	go test -short -coverpkg=./... -coverprofile=.cache/cover.out ./... >/dev/null
	go tool cover -func=.cache/cover.out | tail -n 1

.PHONY: test-compose
test-compose: tools ## run docker-compose.yaml with all profiles end to end, check the results, and build the image twice (podman or docker)
	@tools/compose.sh

.PHONY: release-check
release-check: ## build the archives, checksums and lists of modules of a release twice, and check them (5 minutes; builds GoReleaser once)
	@tools/release.sh

.PHONY: clean
clean: ## remove the files that the targets made
	rm -rf .cache bench/out
