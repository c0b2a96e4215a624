# SPDX-License-Identifier: Apache-2.0
# The binary and nothing else. Build it first: make build; the context is the
# folder that holds it, as tools/compose.sh lays out.
FROM scratch
COPY kvroute /kvroute
# What the scratch image lacks and the embedded NATS server wants.
COPY tmp /tmp
USER 65532:65532
ENTRYPOINT ["/kvroute"]
CMD ["serve"]
