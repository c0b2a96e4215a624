# SPDX-License-Identifier: Apache-2.0
# The image of a release, made by GoReleaser of the binaries that it has built. `docker build .` in the root builds from source.
# The files are the same for all platforms, so no stage runs programs of another one.
FROM --platform=$BUILDPLATFORM docker.io/library/golang:1.26.8-alpine AS files
RUN mkdir -p -m 1777 /out/tmp

FROM scratch
ARG TARGETPLATFORM
COPY $TARGETPLATFORM/kvroute /kvroute
COPY --from=files /out /
COPY --from=files /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
USER 65532:65532
ENTRYPOINT ["/kvroute"]
CMD ["serve"]
